"""Which code computes the scores of a gate: that of a backend, Triton on a GPU, or torch."""

import logging
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Final, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kv_evict import gate_triton
from kv_evict.gate_network import GateNetwork
from kv_policy import CacheShape, LayerView
from kv_policy.backends import installed_backends

log = logging.getLogger("kv_evict")
Logarithm = Callable[[LayerView], Tensor]  # of the scores of a view, [B, H, L]

_TRIED: Final = 33  # tokens of a comparison: more than a program computes
_FAR: Final = 5000  # the last of their positions
_NEAR: Final = 1e-2  # torch may be set to fast products


@runtime_checkable
class GateKernels(Protocol):
    """What a module named by `kv_policy.Backend.token_scores` implements for a gate."""

    def declined(self, view: LayerView, units: int) -> str | None:
        """Return why it does not compute the scores of a view; None if it does."""
        ...

    def gate(
        self,
        view: LayerView,
        linear: Float[Tensor, "N M F"],
        inner: Float[Tensor, "N M F U"],
        outer: Float[Tensor, "N M U"],
    ) -> Float[Tensor, "B H L"]:
        """Return the logarithm of the score of each token in view, in float32.

        It is w · x + sum over units of outer · max(0, inner · x), where x are the features of
        `gate_features.features`, in float32. A key is rotated back by its position, which float32
        multiplies by the frequencies; in an empty slot it is not rotated. Weights are those of all
        layers and of the model's M heads, in float32; the view's first head is `shape.first_head`.
        """
        ...


def kernels_of(view: LayerView, network: GateNetwork, right: Logarithm) -> GateKernels | None:
    """Return the code that computes the scores of a view; None: torch does.

    Triton is used on a GPU after its scores of a few tokens, in every layer and head, were those of
    torch. They are compared once for a network; if they differ, the reason is logged.

    Args:
        view: the tokens, with their keys.
        network: the weights on the view's device; they stay the same.
        right: computes the logarithms by torch.
    """
    assert view.keys is not None
    device, units = view.keys.device.type, network.outer.shape[-1]
    for each in installed_backends().values():
        if not (each.preferred and each.token_scores and each.supports(device)):
            continue
        if each.missing() is None:
            kernels = _kernels(import_module(each.token_scores))
            if kernels.declined(view, units) is None:
                return kernels
    if device != "cuda" or gate_triton.missing() or gate_triton.declined(view, units):
        return None
    if torch.cuda.is_current_stream_capturing():  # a comparison waits for the device
        return None
    known = agrees(gate_triton, network, right, view.shape, view.keys.dtype)
    return _kernels(gate_triton) if known else None


@lru_cache(maxsize=32)
def agrees(
    kernels: ModuleType,
    network: GateNetwork,
    right: Logarithm,
    shape: CacheShape,
    dtype: torch.dtype,
) -> bool:
    """Return whether scores of random tokens are those of torch; else the reason is logged.

    Args:
        kernels: a module of `GateKernels` that does not decline this shape.
        network: the weights, on the device to use.
        right: computes the logarithms by torch.
        shape: of the cache; its layers and heads are compared.
        dtype: of keys and values.
    """
    device = network.linear.device
    view = _tried(shape, dtype, device)
    try:
        weights = network.linear, network.inner, network.outer
        found = _kernels(kernels).gate(view, *weights)
        wanted = right(view)
        wrong = int((~((found - wanted).abs() <= _NEAR * (1 + wanted.abs()))).sum())
        reason = f"{wrong} of {found.numel()} scores differ" if wrong else None
    except Exception as error:  # a compiler's or a driver's, of any kind
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        log.warning("torch computes the scores of a gate on %s: %s", device, reason)
    return reason is None


def _tried(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> LayerView:
    g = torch.Generator().manual_seed(0)
    lead = (shape.layers, shape.kv_heads, _TRIED)
    place = torch.randint(-1, _FAR + 1, (shape.layers, 1, _TRIED), generator=g).expand(lead)
    key, value = (
        torch.randn(*lead, dim, generator=g).to(device, dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    return LayerView(
        layer=torch.arange(shape.layers, device=device),
        shape=shape,
        position=place.to(device),
        fresh=(place >= 0).to(device),
        score=torch.zeros(lead, device=device),
        length=torch.full((shape.layers,), _FAR + 1, device=device),
        keys=key,
        values=value,
    )


def _kernels(module: ModuleType) -> GateKernels:
    return cast(GateKernels, module)  # a module of functions
