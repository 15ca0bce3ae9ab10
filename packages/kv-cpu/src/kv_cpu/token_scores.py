"""The token scores `cpu`, which kv-evict's gate is computed with natively.

Everything is computed in float32, whatever the dtype of keys and values. Scores are those of torch
up to rounding, also in empty slots, whose keys are not rotated.
"""

from functools import lru_cache
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_cpu.arguments import MOST_DIM
from kv_cpu.library import chosen, missing
from kv_policy import LayerView, Rope, Ropes
from kv_policy.described import unreadable

__all__ = ["declined", "gate", "missing"]

MOST_UNITS: Final = 4096  # of a hidden layer


def declined(view: LayerView, units: int) -> str | None:
    """Return why native code does not compute the scores of a view; None if it does.

    Args:
        view: the tokens, with their keys and values.
        units: size of the gate's hidden layer.
    """
    reason = unreadable(view)
    if reason is not None:
        return reason
    for vectors in (view.keys, view.values):
        assert vectors is not None
        if vectors.device.type != "cpu":
            return f"tensors on {vectors.device.type}"
        if vectors.shape[-1] > MOST_DIM:
            return f"vectors of more than {MOST_DIM} dimensions"
    if units > MOST_UNITS:
        return f"a hidden layer of more than {MOST_UNITS} units"
    return None


def gate(
    view: LayerView,
    linear: Float[Tensor, "N M F"],
    inner: Float[Tensor, "N M F U"],
    outer: Float[Tensor, "N M U"],
) -> Float[Tensor, "B H L"]:
    """Return the logarithm of the score of each token, as `kv_evict.gate_kernels` defines it.

    Args:
        view: tokens that are not `declined`; its shape's `first_head` is the first of their heads.
        linear: weights of all layers and heads of the model, in float32, as are the others.
        inner: weights of each unit.
        outer: weights of the units.

    Raises:
        RuntimeError: a layer, head or size differs from that of the weights.
        OSError: the library cannot be loaded.
        ValueError: the environment names an instruction set that is unavailable here.
    """
    assert view.keys is not None
    assert view.values is not None
    assert view.shape.rope is not None
    frequency, pairs = _turns(view.shape.rope, view.keys.shape[-1])
    result: Tensor = torch.ops.kv_cpu.gate(
        _rows(view.keys),
        _rows(view.values),
        view.position,
        view.layer.contiguous(),
        frequency,
        pairs,
        linear.contiguous(),
        inner.contiguous(),
        outer.contiguous(),
        view.shape.first_head,
        chosen(),
    )
    return result


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=64)
def _turns(rope: Rope | Ropes, dim: int) -> tuple[Float[Tensor, "R _"], Int[Tensor, "R _ 2"]]:
    """Return the frequencies and dimensions of the pairs of each layer, or of one for all."""
    each = rope.each if isinstance(rope, Ropes) else (rope,)
    most = max(len(one.frequencies) for one in each)
    frequency = torch.zeros(len(each), most, dtype=torch.float32)
    pairs = torch.full((len(each), most, 2), -1)  # -1: other layers have more pairs
    for i, one in enumerate(each):
        count = len(one.frequencies)
        if count:
            frequency[i, :count] = torch.tensor(one.frequencies, dtype=torch.float32)
            pairs[i, :count] = torch.tensor(one.pairs_of(dim))
    return frequency, pairs
