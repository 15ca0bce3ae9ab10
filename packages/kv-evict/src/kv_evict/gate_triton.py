"""The scores of a gate in Triton, as `gate_kernels.GateKernels`; imported at the first call."""

from typing import Final

from jaxtyping import Float
from torch import Tensor

from kv_policy import LayerView
from kv_policy.described import unreadable
from kv_policy.interpreter import interpreted, missing
from kv_policy.shape import turns_by_dimension

__all__ = ["declined", "gate", "missing"]

_MOST_UNITS: Final = 64  # of a hidden layer, whose sums are in registers


def declined(view: LayerView, units: int) -> str | None:
    """Return why Triton does not compute the scores of a view; None if it does.

    Args:
        view: the tokens, with their keys and values.
        units: size of the gate's hidden layer.
    """
    reason = unreadable(view)
    if reason is not None:
        return reason
    for vectors in (view.keys, view.values):
        assert vectors is not None
        if vectors.device.type != "cuda" and not interpreted():
            return f"tensors on {vectors.device.type}"
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
        turns_by_dimension(view.shape.rope, view.keys.shape[-1], view.keys.device),
        (linear.contiguous(), inner.contiguous(), outer.contiguous()),
        view.shape.first_head,
    )
