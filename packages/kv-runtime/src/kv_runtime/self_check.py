"""The self-check of a backend that a cache chooses by itself: its results against torch's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kv_policy import Basis, Budget, CacheShape, Capabilities, Formats, KVPolicy, complete

NEAR: Final = 0.02  # of the norm: bfloat16 rounds by far less, and a wrong kernel errs by far more
PROMPT: Final = 80  # tokens
STEPS: Final = 3  # of decoding
SEEDS: Final = (0, 1)  # a selector may choose between equal scores differently; not twice


@runtime_checkable
class Cache(Protocol):
    """What a self-check needs of a `PolicyCache`."""

    def begin(self, valid: Bool[Tensor, "B L"]) -> None:
        """Start a pass."""
        ...

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        scale: float,
    ) -> Float[Tensor, "B H G L Dv"]:
        """Attend, and store."""
        ...


@dataclass(frozen=True)
class SelfCheck:
    """A comparison of a backend with another, on what a cache would use it for.

    Attributes:
        backend: its name.
        policy: the policy.
        shape: of the cache.
        device: of the cache.
        page_tokens: tokens of the first tier per page.
        cache: creates a cache, with the arguments of `PolicyCache`.
        against: the name of the backend whose results are right.
    """

    backend: str
    policy: KVPolicy = field(compare=False)
    shape: CacheShape = field(compare=False)
    device: torch.device
    page_tokens: int
    cache: Callable[..., Cache] = field(compare=False)
    against: str = "torch"
    said: tuple[object, ...] = field(init=False)  # what two policies and shapes are equal by

    def __post_init__(self) -> None:
        """Name policy and shape."""
        shape = self.shape
        sizes = (shape.layers, shape.kv_heads, shape.group, shape.key_dim, shape.value_dim)
        object.__setattr__(self, "said", (str(self.policy), *sizes, shape.dtype))

    def run(self) -> str | None:
        """Return how the backend fails; None: it passes.

        Two sequences are prefilled and decode a few tokens under the policy, with vectors drawn at
        random. It takes about a second, besides compiling the kernels that will be used.

        Raises:
            torch.AcceleratorError: the device is unusable.
        """
        for seed in SEEDS:
            try:
                error = max(_error(*each) for each in self._both(seed))
            except torch.AcceleratorError:
                raise
            except Exception as wrong:  # a compiler or a kernel may fail in any way
                return f"{type(wrong).__name__}: {wrong}"
            if error <= NEAR:
                return None
        return f"its results differ from those of {self.against} by {error:.0%}"

    def _both(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the attention of every pass and layer, of both backends."""
        with _defaults(), torch.inference_mode(False), torch.no_grad():
            names = self.backend, self.against
            yield from zip(*(_attended(self, name, seed) for name in names), strict=True)


@cache
def failure(check: SelfCheck) -> str | None:
    """Return what `SelfCheck.run` does, which runs once for equal checks."""
    return check.run()


@contextmanager
def _defaults() -> Iterator[None]:
    """Use torch's own defaults, which an engine changes while it loads a model."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _attended(check: SelfCheck, backend: str, seed: int) -> Iterator[Float[Tensor, "B H G L Dv"]]:
    shape, device = check.shape, check.device
    cache = _cache(check, backend)
    draw = torch.Generator().manual_seed(seed)
    heads, group = shape.kv_heads, shape.group
    length = torch.tensor([PROMPT, PROMPT // 2])[:, None]
    for count in (PROMPT, *[1] * STEPS):
        before = count - length if count > 1 else torch.zeros_like(length)  # padding
        valid = (torch.arange(count) >= before).to(device)
        cache.begin(valid)
        for layer in range(shape.layers):
            query = torch.randn(2, heads, group, count, shape.key_dim, generator=draw)
            key = torch.randn(2, heads, count, shape.key_dim, generator=draw)
            value = torch.randn(2, heads, count, shape.value_dim, generator=draw)
            query, key, value = (x.to(device, shape.dtype) for x in (query, key, value))
            if shape.value_in_key:
                value = key[..., : shape.value_dim]
            out = cache.attend(layer, query, key, value, shape.key_dim**-0.5)
            yield out.masked_fill(~valid[:, None, None, :, None], 0)


def _cache(check: SelfCheck, backend: str) -> Cache:
    """Create a cache with a budget below the prompt, if the policy takes one."""
    policy = check.policy
    selector = None if policy.selector is None else complete(policy.selector)
    if selector is not None and selector.replay is not None:  # nothing runs a model again here
        policy, selector = _Unselected(policy), None

    def made(budgets: list[Budget | None] | None) -> Cache:
        return check.cache(
            policy,
            check.shape,
            page_tokens=check.page_tokens,
            budgets=budgets,
            device=check.device,
            backend=backend,
        )

    if selector is None or selector.budget is None:
        return made(None)
    return made([Budget(max(selector.protected, PROMPT // 2))] * 2)


@dataclass(frozen=True)
class _Unselected:
    """A policy that keeps every token, in the formats and the basis of another."""

    of: KVPolicy
    selector: None = None
    reading: None = None

    @property
    def formats(self) -> Formats | None:
        return self.of.formats

    @property
    def basis(self) -> Basis | None:
        return self.of.basis

    @property
    def capabilities(self) -> Capabilities:
        return self.of.capabilities

    @property
    def fitted_to(self) -> str | None:
        return self.of.fitted_to


def _error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over that of what is right; infinite for NaN."""
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return float(error.nan_to_num(torch.inf))
