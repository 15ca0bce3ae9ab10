"""The scores of a gate in Triton, as `gate_kernels.GateKernels`; imported at the first call."""

from functools import lru_cache
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import LayerView, Rope, Ropes
from kv_policy.described import NUMBERS
from kv_policy.interpreter import interpreted, missing

__all__ = ["declined", "gate", "missing"]

_MOST_UNITS: Final = 64  # of a hidden layer, whose sums are in registers


def declined(view: LayerView, units: int) -> str | None:
    """Return why Triton does not compute the scores of a view; None if it does.

    Args:
        view: the tokens, with their keys and values.
        units: size of the gate's hidden layer.
    """
    if view.keys is None or view.values is None or view.shape.rope is None:
        return "no keys, no values, or an unknown rotary embedding"
    for vectors in (view.keys, view.values):
        if vectors.device.type != "cuda" and not interpreted():
            return f"tensors on {vectors.device.type}"
        if vectors.dtype not in NUMBERS:
            return f"vectors in {vectors.dtype}"
    if units > _MOST_UNITS:
        return f"a hidden layer of more than {_MOST_UNITS} units"
    return None


def gate(
    view: LayerView,
    linear: Float[Tensor, "N M F"],
    inner: Float[Tensor, "N M F U"],
    outer: Float[Tensor, "N M U"],
) -> Float[Tensor, "B H L"]:
    """Return the logarithm of the score of each token, as `GateKernels` defines it.

    Angles are accurate up to about 1e9.
    """
    from kv_evict import gate_gpu

    assert view.keys is not None
    assert view.values is not None
    assert view.shape.rope is not None
    return gate_gpu.gate(
        view.keys,
        view.values,
        view.position,
        view.layer.contiguous(),
        _turns(view.shape.rope, view.keys.shape[-1], view.keys.device),
        (linear.contiguous(), inner.contiguous(), outer.contiguous()),
        view.shape.first_head,
    )


@lru_cache(maxsize=64)
def _turns(
    rope: Rope | Ropes, dim: int, device: torch.device
) -> tuple[Float[Tensor, "R D"], Int[Tensor, "R D"], Float[Tensor, "R D"]]:
    """Return what each dimension is rotated by, its partner, and the sign of the partner."""
    each = rope.each if isinstance(rope, Ropes) else (rope,)
    frequency, sign = torch.zeros(2, len(each), dim, dtype=torch.float32)
    partner = torch.arange(dim).repeat(len(each), 1)
    for row, one in enumerate(each):
        pairs = one.pairs
        if pairs is None:
            pairs = tuple((i, i + dim // 2) for i in range(len(one.frequencies)))
        for (i, j), number in zip(pairs, one.frequencies, strict=True):
            frequency[row, i] = frequency[row, j] = number
            partner[row, i], partner[row, j] = j, i
            sign[row, i], sign[row, j] = 1, -1
    with torch.inference_mode(False):  # cached tensors outlive the caller
        return frequency.to(device), partner.to(device), sign.to(device)
