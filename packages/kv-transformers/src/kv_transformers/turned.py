"""Rotate a model's value and output projections by a value basis, in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kv_policy import CacheShape, FoldsValues, HeadBasis
from kv_transformers.fold import expect_own_values, foldable
from kv_transformers.folded import turned_rows
from kv_transformers.layers import stored_layers
from kv_transformers.modules import attention_modules
from kv_transformers.probe import expect_direct, read
from kv_transformers.projections import Projections
from kv_transformers.support import UnsupportedModelError
from kv_transformers.watching import EmptyCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR: Final = 0.25  # relative error of a layer's output; rounding in bfloat16 stays far below it


@dataclass(frozen=True)
class Turn:
    """How a value basis enters a parameter.

    Attributes:
        basis: the rotation of each KV head, with all dimensions.
        side: whether the rows compute values, or the columns read the outputs of attention.
    """

    basis: HeadBasis
    side: Literal["rows", "columns"]

    def __call__(self, x: Float[Tensor, "*S n"]) -> Float[Tensor, "*S n"]:
        """Return the parameter, as a file has it, with the basis in it; computed in float64."""
        if self.side == "columns":
            found = turned_rows(self.basis, x.mT, dual=True).mT
        elif x.ndim == 1:
            found = turned_rows(self.basis, x[:, None], dual=False)[:, 0]
        else:
            found = turned_rows(self.basis, x, dual=False)
        return found.to(x.dtype).contiguous()


@dataclass(frozen=True)
class Turned:
    """A parameter of a model that a value basis enters, with its name in the base model."""

    name: str
    own: Tensor
    turn: Turn


def turned(model: "PreTrainedModel", basis: FoldsValues, shape: CacheShape) -> list[Turned]:
    """Return the parameters of the layers of full attention that a basis enters, unchanged yet.

    A few tokens are run, as for `Fold`.

    Raises:
        UnsupportedModelError: the model computes something else between its value and output
            projections and attention, these are fused, quantized or shared, or layers read the
            values of others.
    """
    expect_own_values(model)
    layers = stored_layers(model)
    modules = foldable(model, layers)
    named = attention_modules(model, layers)
    projections = [Projections(m, i) for i, m in zip(layers, modules, strict=True)]
    outputs = [each.output for each in projections]
    expect_direct(model, dict(zip(layers, modules, strict=True)), outputs, frozenset({"values"}))
    found: list[Turned] = []
    for index, (layer, each) in enumerate(zip(layers, projections, strict=True)):
        rotation, place = basis.value_rotation(index), named[layer][0]
        v, o = each["v_proj"], each[each.output]
        _expect_sizes(v, o, shape, layer)
        rows, columns = Turn(rotation, "rows"), Turn(rotation, "columns")
        found.append(Turned(f"{place}.v_proj.weight", v.weight, rows))
        if v.bias is not None:
            found.append(Turned(f"{place}.v_proj.bias", v.bias, rows))
        found.append(Turned(f"{place}.{each.output}.weight", o.weight, columns))
    _expect_single(model, found)
    return found


@torch.no_grad()
def turn_checked(model: "PreTrainedModel", found: Sequence[Turned]) -> None:
    """Rotate the parameters in place, and compare each layer's output before and after.

    Raises:
        UnsupportedModelError: an output changes by more than rounding.
    """
    outputs = {each.name: each.own for each in found if each.turn.side == "columns"}
    before = _outputs(model, outputs)
    for each in found:
        each.own.copy_(each.turn(each.own))
    after = _outputs(model, outputs)
    for name, x in after.items():
        scale = before[name].norm().clamp(min=torch.finfo(x.dtype).tiny)
        error = float((x - before[name]).norm() / scale)
        if not error <= NEAR:
            raise UnsupportedModelError(
                f"the output of {name.removesuffix('.weight')} of {type(model).__name__} changes "
                f"by {error:.0%} with the basis in its weights, so its code does not read values "
                "head by head; use the policy's cache without folding"
            )


def _outputs(model: "PreTrainedModel", weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a few tokens, and return what the projections with these weights compute."""
    names = {id(weight): name for name, weight in weights.items()}
    found: dict[str, Tensor] = {}
    handles = []
    for module in model.modules():
        name = names.get(id(getattr(module, "weight", None)))
        if name is None:
            continue

        def keep(_: nn.Module, given: object, out: Tensor, name: str = name) -> None:
            found[name] = out.double()

        handles.append(module.register_forward_hook(keep))
    try:
        read(model, EmptyCache(model))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _expect_sizes(v: nn.Linear, o: nn.Linear, shape: CacheShape, layer: int) -> None:
    rows, columns = v.out_features, o.in_features
    values = shape.kv_heads * shape.value_dim
    if (rows, columns) != (values, values * shape.group):
        raise UnsupportedModelError(
            f"layer {layer} has a value projection of {rows} rows and an output projection of "
            f"{columns} columns, but its {shape.kv_heads} KV heads of {shape.value_dim} dimensions "
            f"have {values} and {values * shape.group}; use the policy's cache without folding"
        )


def _expect_single(model: "PreTrainedModel", found: Sequence[Turned]) -> None:
    """Raise if a parameter that changes is also that of another module."""
    mine = {id(each.own) for each in found}
    uses = sum(id(own) in mine for _, own in model.named_parameters(remove_duplicate=False))
    if not len(mine) == len(found) == uses:
        raise UnsupportedModelError(
            f"modules of {type(model).__name__} share {len(mine)} parameters that a basis changes, "
            f"used in {uses} places, and each would need a basis of its own; use the policy's "
            "cache without folding"
        )
