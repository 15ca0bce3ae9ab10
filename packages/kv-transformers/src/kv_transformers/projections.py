"""Folded projections of attention modules, with a basis in their weights."""

from typing import Final

from torch import Tensor, nn
from torch.nn.functional import pad

from kv_policy import HeadBasis, fold_values
from kv_transformers.folded import FoldedLinear, FoldState, turned_rows
from kv_transformers.support import UnsupportedModelError

OUTPUT: Final = ("o_proj", "out_proj")  # names of output projections in transformers


class Projections:
    """The projections of an attention module, by name."""

    def __init__(self, module: nn.Module, layer: int) -> None:
        """Read the projections of a layer's module, which has an output projection."""
        self._found, self._layer = dict(module.named_children()), layer
        self.output = next(name for name in OUTPUT if name in self._found)

    def __getitem__(self, name: str) -> nn.Linear:
        """Return a projection; raise if it is not a plain layer."""
        layer = self._found.get(name)
        weight = getattr(layer, "weight", None)
        if (
            isinstance(layer, nn.Linear)
            and type(layer) is nn.Linear
            and type(layer.weight.data) is Tensor  # quantizers may use a tensor subclass
            and layer.weight.is_floating_point()
            and layer.weight.itemsize >= 2
        ):
            return layer
        kind = f" of {weight.dtype}" if isinstance(weight, Tensor) else ""
        raise UnsupportedModelError(
            f"{name} of layer {self._layer} is a {type(layer).__name__}{kind}; a basis is folded "
            "into plain nn.Linear layers with floating-point weights of 16 bits or more, so load "
            "the model unquantized, or use the policy's cache without folding"
        )


def folded_values(
    found: Projections, basis: HeadBasis, layer: int, state: FoldState
) -> list[tuple[str, FoldedLinear]]:
    """Return the value and output projections of a layer, folded with its value basis."""
    v, o, packing = found["v_proj"], found[found.output], state.packing[layer]
    weight, reads = fold_values(basis, v.weight.double(), o.weight.double())
    bias = None
    if v.bias is not None:
        bias = packing.rows(turned_rows(basis, v.bias[:, None], dual=False))[:, 0]
    return [
        ("v_proj", FoldedLinear.of(v, packing.rows(weight), bias, state)),
        (found.output, FoldedLinear.of(o, reads[:, packing.output], o.bias, state)),
    ]


def folded_keys(
    found: Projections, basis: HeadBasis, dim: int, state: FoldState
) -> list[tuple[str, FoldedLinear]]:
    """Return the folded query and key projections of a layer without a rotary embedding."""

    def turned(x: Tensor, dual: bool) -> Tensor:
        rows = turned_rows(basis, x, dual).unflatten(0, (-1, basis.matrix.shape[2]))
        # The model views the output as heads of its own dimension, so pad with zeros.
        return pad(rows, (0, 0, 0, dim - rows.shape[1])).flatten(0, 1)

    new = []
    for name, dual in (("q_proj", True), ("k_proj", False)):
        old = found[name]
        bias = None if old.bias is None else turned(old.bias[:, None], dual)[:, 0]
        new.append((name, FoldedLinear.of(old, turned(old.weight, dual), bias, state)))
    return new
