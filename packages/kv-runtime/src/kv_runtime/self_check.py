"""A trial of a backend before a cache uses it unasked: its results against those of torch."""

from collections.abc import Callable, Iterator
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
    """What a trial needs of a `PolicyCache`."""

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
class Trial:
    """A backend, and what a cache would use it for.

    Attributes:
        backend: its name.
        policy: the policy.
        shape: of the cache.
        device: of the cache.
        page_tokens: tokens of the first tier per page.
        cache: creates a cache, with the arguments of `PolicyCache`.
    """

    backend: str
    policy: KVPolicy = field(compare=False)
    shape: CacheShape = field(compare=False)
    device: torch.device
    page_tokens: int
    cache: Callable[..., Cache] = field(compare=False)
    said: tuple[object, ...] = field(init=False)  # what two policies and shapes are equal by

    def __post_init__(self) -> None:
        """Name policy and shape."""
        shape = self.shape
        sizes = (shape.layers, shape.kv_heads, shape.group, shape.key_dim, shape.value_dim)
        object.__setattr__(self, "said", (str(self.policy), *sizes, shape.dtype))


@cache
def failure(trial: Trial) -> str | None:
    """Return how a backend fails a trial of about a second, which runs once; None: it passes.

    Two sequences are read and decode a few tokens under the policy, with vectors drawn at random.
    """
    for seed in SEEDS:
        try:
            error = max(_error(*each) for each in _both(trial, seed))
        except torch.AcceleratorError:
            raise  # the device is unusable
        except Exception as wrong:  # a compiler or a kernel may fail in any way
            return f"{type(wrong).__name__}: {wrong}"
        if error <= NEAR:
            return None
    return f"its results differ from those of torch by {error:.0%}"


def _both(trial: Trial, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the attention of every pass and layer, of the backend and of torch."""
    with torch.inference_mode(False), torch.no_grad():
        yield from zip(
            _attended(trial, trial.backend, seed), _attended(trial, "torch", seed), strict=True
        )


def _attended(trial: Trial, backend: str, seed: int) -> Iterator[Float[Tensor, "B H G L Dv"]]:
    shape, device = trial.shape, trial.device
    cache = _cache(trial, backend)
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
            if shape.value_in_key:
                value = key[..., : shape.value_dim]
            query, key, value = (x.to(device, shape.dtype) for x in (query, key, value))
            out = cache.attend(layer, query, key, value, shape.key_dim**-0.5)
            yield out.masked_fill(~valid[:, None, None, :, None], 0)


def _cache(trial: Trial, backend: str) -> Cache:
    """Create a cache with a budget below the prompt, if the policy takes one."""
    policy = trial.policy
    selector = None if policy.selector is None else complete(policy.selector)
    if selector is not None and selector.replay is not None:  # nothing runs a model again here
        policy, selector = _Unselected(policy), None

    def made(budgets: list[Budget | None] | None) -> Cache:
        return trial.cache(
            policy,
            trial.shape,
            page_tokens=trial.page_tokens,
            budgets=budgets,
            device=trial.device,
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
