"""Tensors of a policy as buffers of a vLLM layer, which vLLM restores after its deepest sleep."""

from collections.abc import Iterator

from torch import Tensor
from torch.nn import Module

from kv_policy import LayerBasis


def hold_basis(layer: Module, basis: LayerBasis) -> None:
    """Register a basis's tensors as buffers of `layer`, in place and without copies.

    They are allocated while the weights load. Sleep at level 2 discards what was allocated then,
    and only buffers and parameters get their values back.
    """
    for name, tensor in _tensors(basis):
        layer.register_buffer(f"kv_policy_{name}", tensor, persistent=False)


def _tensors(basis: LayerBasis) -> Iterator[tuple[str, Tensor]]:
    for vectors, found in (("key", basis.key), ("value", basis.value)):
        if found is None:
            continue
        for part, x in (("matrix", found.matrix), ("dual", found.dual), ("shift", found.shift)):
            if x is not None:  # one matrix expanded over all heads is written once
                yield f"{vectors}_{part}", x[:1] if x.stride(0) == 0 else x
