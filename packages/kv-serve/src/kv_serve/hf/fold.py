"""Folding a policy's basis into a model's projections, so that nothing is rotated per token.

After ZACK, sections 4.1 and 4.2: the value projection gives coordinates in the basis, and the
output projection reads them. Where a model has no rotary embedding the query and key projections
give coordinates too; otherwise both are rotated after it, once for each new token.
"""

from types import TracebackType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kv_policy import CacheShape, HeadBasis, KVPolicy, LayerBasis, fold_values, parse
from kv_serve.bases import Bases, Folded, widened
from kv_serve.hf.attention import install
from kv_serve.hf.folded import FoldedLinear, FoldState, Packing, turned_rows
from kv_serve.hf.support import UnsupportedModelError, cache_shape
from kv_serve.models.identity import check_fitted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUT: Final = ("o_proj", "out_proj")  # what models of transformers call their output projection


class Fold:
    """A model whose projections hold a basis, until `restore`; also a context manager.

    The old layers are set aside, not changed: restored, the model is what it was, object by object.
    While folded it serves caches of the same basis only. Other caches, and none, are refused.
    """

    def __init__(self, model: "PreTrainedModel", policy: KVPolicy | str) -> None:
        """Fold the basis of a policy into the model.

        Args:
            model: a model of transformers that a compressed cache can serve.
            policy: a policy with a basis, or its text form.

        Raises:
            UnsupportedModelError: projections are fused, quantized, or called otherwise, or what
                the basis maps lies on the wrong side of a rotary embedding; the model is as it was.
            ValueError: the policy has no basis, was calibrated with another model, or the model is
                folded already.
        """
        policy = parse(policy) if isinstance(policy, str) else policy
        if policy.basis is None:
            raise ValueError(f"{policy} has no basis to fold; name one that has, such as zack")
        check_fitted(model, policy)
        if folded_by(model) is not None:
            raise ValueError("the model is folded already; restore it first")
        shape = cache_shape(model)
        bases = Bases.of(policy.basis, shape, torch.device("cpu"))
        bound = [policy.basis.bind(i, shape) for i in range(shape.layers)]
        turned, width = _is_rotary(model), bases.stored.value_dim
        self.state = FoldState(
            str(policy),
            policy.basis,
            _what(bound[0], turned),
            _packing(bases, shape, turned, model.device),
        )
        modules = _attention_modules(model, shape.layers)
        changes: list[tuple[nn.Module, str, FoldedLinear]] = []
        for i, (module, basis) in enumerate(zip(modules, bound, strict=True)):
            found = _Projections(module, i)
            if basis.value is not None:
                new = _folded_values(found, widened(basis.value, width), i, self.state)
                changes += [(module, name, layer) for name, layer in new]
            if basis.key is not None and "keys" in self.state.what:
                new = _folded_keys(found, basis.key, shape.key_dim, self.state)
                changes += [(module, name, layer) for name, layer in new]
        install(model)
        self._old = [(module, name, getattr(module, name)) for module, name, _ in changes]
        for module, name, layer in changes:  # nothing has changed before all are made
            setattr(module, name, layer)

    def restore(self) -> None:
        """Put the old projections back."""
        old, self._old = self._old, []
        for module, name, layer in old:
            setattr(module, name, layer)

    def __enter__(self) -> "Fold":
        """Fold for the length of a `with` block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the model."""
        self.restore()


def folded_by(model: "PreTrainedModel") -> FoldState | None:
    """What a model's projections hold of a basis; None: they are its own."""
    found = (m.state for m in model.base_model.modules() if isinstance(m, FoldedLinear))
    return next(found, None)


def expect_fold(model: "PreTrainedModel", policy: KVPolicy) -> FoldState | None:
    """What the model's projections hold, which must be the policy's basis or nothing.

    Raises:
        ValueError: they hold another basis.
    """
    found = folded_by(model)
    if found is not None and found.basis != policy.basis:
        raise ValueError(
            f"the model's projections are folded for {found.policy}, and {policy} stores vectors "
            "otherwise; restore the model first"
        )
    return found


def _is_rotary(model: "PreTrainedModel") -> bool:
    """Whether queries and keys are turned by their positions after the projections."""
    config = model.config.get_text_config(decoder=True)
    named = any("rotary" in name for name, _ in model.base_model.named_modules())
    return named or getattr(config, "rope_parameters", None) is not None


def _what(basis: LayerBasis, rotary: bool) -> Folded:
    """What can be folded: values always, keys where no rotary embedding comes after them.

    Raises:
        UnsupportedModelError: nothing, or not all that would have to be.
    """
    found: Folded = frozenset({"values"}) if basis.value is not None else frozenset()
    if not rotary and basis.key is not None:
        if basis.together > 1:
            raise UnsupportedModelError(
                f"the policy stores {basis.together} KV heads together, which cannot be folded "
                "into a model without a rotary embedding; use its cache without folding"
            )
        found |= {"keys"}
    if not found:
        raise UnsupportedModelError(
            "the policy has a basis for keys only, which a rotary embedding keeps from being "
            "folded; use its cache without folding"
        )
    return found


def _packing(
    bases: Bases, shape: CacheShape, packed: bool, device: torch.device
) -> tuple[Packing, ...]:
    """How values and outputs lie; the code of models with a rotary embedding takes them packed."""
    width, group = bases.stored.value_dim, bases.stored.group
    return tuple(
        Packing.of(rank, width, shape.value_dim, group, packed, device) for rank in bases.value_dims
    )


def _attention_modules(model: "PreTrainedModel", layers: int) -> list[nn.Module]:
    """The modules that hold the projections, by layer."""
    found: dict[int, nn.Module] = {}
    for module in model.base_model.modules():
        index = getattr(module, "layer_idx", None)  # as transformers' attention modules have it
        names = {name for name, _ in module.named_children()}
        if isinstance(index, int) and "v_proj" in names and names & set(OUTPUT):
            found[index] = module
    missing = next((i for i in range(layers) if i not in found), None)
    if missing is not None:
        raise UnsupportedModelError(
            f"layer {missing} of {type(model).__name__} has no projections called v_proj and "
            f"{' or '.join(OUTPUT)} (a fused one, perhaps), so a basis cannot be folded into them; "
            "its cache works without folding"
        )
    return [found[i] for i in range(layers)]


class _Projections:
    """The projections of an attention module, by what they are called."""

    def __init__(self, module: nn.Module, layer: int) -> None:
        self._found, self._layer = dict(module.named_children()), layer
        self.output = next(name for name in OUTPUT if name in self._found)

    def __getitem__(self, name: str) -> nn.Linear:
        """Give one, which must be a plain layer."""
        layer = self._found.get(name)
        weight = getattr(layer, "weight", None)
        if (
            isinstance(layer, nn.Linear)
            and type(layer) is nn.Linear
            and type(layer.weight.data) is Tensor  # quantizers may put a class of their own there
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


def _folded_values(
    found: _Projections, basis: HeadBasis, layer: int, state: FoldState
) -> list[tuple[str, FoldedLinear]]:
    """The value and output projections of a layer, with its value basis."""
    v, o, packing = found["v_proj"], found[found.output], state.packing[layer]
    weight, reads = fold_values(basis, v.weight.double(), o.weight.double())
    bias = None
    if v.bias is not None:
        bias = packing.rows(turned_rows(basis, v.bias[:, None], dual=False))[:, 0]
    return [
        ("v_proj", FoldedLinear.of(v, packing.rows(weight), bias, state)),
        (found.output, FoldedLinear.of(o, reads[:, packing.output], o.bias, state)),
    ]


def _folded_keys(
    found: _Projections, basis: HeadBasis, dim: int, state: FoldState
) -> list[tuple[str, FoldedLinear]]:
    """The query and key projections of a layer without rotary embedding, with its key basis."""

    def turned(x: Tensor, dual: bool) -> Tensor:
        rows = turned_rows(basis, x, dual).unflatten(0, (-1, basis.matrix.shape[2]))
        # The model views what comes out as heads of its own dimension: zeros fill them.
        return pad(rows, (0, 0, 0, dim - rows.shape[1])).flatten(0, 1)

    new = []
    for name, dual in (("q_proj", True), ("k_proj", False)):
        old = found[name]
        bias = None if old.bias is None else turned(old.bias[:, None], dual)[:, 0]
        new.append((name, FoldedLinear.of(old, turned(old.weight, dual), bias, state)))
    return new
