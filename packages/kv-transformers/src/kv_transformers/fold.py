"""Fold a policy's basis into a model's projections, so that tokens need no extra rotation.

After ZACK, sections 4.1 and 4.2: the value projection outputs coordinates in the basis, and the
output projection reads them. Without a rotary embedding the query and key projections output
coordinates too; otherwise both are rotated after it, once for each new token.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from kv_policy import CacheShape, KVPolicy, LayerBasis, parse
from kv_runtime import Bases, Folded, check_basis, same_maps, widened
from kv_transformers.fitted import check_fitted
from kv_transformers.folded import FOLDED, FoldedLinear, FoldState, Packing
from kv_transformers.layers import layer_caches, stored_layers
from kv_transformers.models.mark import mark_of
from kv_transformers.modules import attention_modules
from kv_transformers.probe import expect_direct
from kv_transformers.projections import OUTPUT, Projections, folded_keys, folded_values
from kv_transformers.support import UnsupportedModelError, cache_shape
from kv_transformers.switch import install

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Fold:
    """A model with a basis folded into its projections, until `restore`; also a context manager.

    The old layers are kept unchanged: `restore` puts the same objects back, moved to the model's
    current device and dtype. While folded, the model only works with caches of the same basis.
    Other caches, calls without a cache, and saving raise.
    """

    def __init__(self, model: "PreTrainedModel", policy: KVPolicy | str) -> None:
        """Fold the basis of a policy into the model.

        A few tokens are run first, because a model's code may apply an operation between
        projections and attention that does not commute with a basis, such as a norm.

        Args:
            model: a model of transformers that supports a compressed cache.
            policy: a policy with a basis, or its text form.

        Raises:
            UnsupportedModelError: projections are fused, quantized or have other names, or a rotary
                embedding or another operation separates them from the vectors that the basis maps;
                the model is unchanged.
            ValueError: the policy has no basis, was calibrated with another model, or the model is
                folded already.
        """
        policy = parse(policy) if isinstance(policy, str) else policy
        if policy.basis is None:
            raise ValueError(f"{policy} has no basis to fold; use one that has, such as zack")
        check_fitted(model, policy)
        if folded_by(model) is not None:
            raise ValueError("the model is folded already; restore it first")
        if mark_of(model.config) is not None:
            raise ValueError(
                "the model is of a folded checkpoint, so nothing is left to fold; use the policy's "
                "cache with the model as it is"
            )
        shape = cache_shape(model)
        expect_own_values(model)
        check_basis(policy, shape)
        bases = Bases.of(policy.basis, shape, torch.device("cpu"))
        bound = tuple(policy.basis.bind(i, shape) for i in range(shape.layers))
        rotary = _is_rotary(model)
        packing = _packing(bases, shape, rotary, model.device)
        what = _what(bound, rotary)
        if bases.shifted and "keys" in what:
            raise UnsupportedModelError(
                f"{policy} subtracts the mean key of each head, which is not folded into a model "
                "without a rotary embedding; use its cache without folding"
            )
        self.state = FoldState(str(policy), policy.basis, bound, what, packing)
        self._model, self._old = model, list[tuple[nn.Module, str, nn.Module]]()
        layers = stored_layers(model)
        modules = foldable(model, layers)
        found = [Projections(module, i) for i, module in zip(layers, modules, strict=True)]
        new = _folded(found, shape, self.state, bases.stored.value_dim)
        changes = [(modules[i], name, layer) for i, name, layer in new]
        outputs = [each.output for each in found]
        expect_direct(model, dict(zip(layers, modules, strict=True)), outputs, self.state.what)
        install(model)
        self._old = [(module, name, getattr(module, name)) for module, name, _ in changes]
        for module, name, layer in changes:  # only after all are created
            setattr(module, name, layer)
        setattr(model.base_model, FOLDED, self.state)

    def restore(self) -> None:
        """Restore the old projections."""
        old, self._old = self._old, []
        for module, name, layer in old:
            new = getattr(module, name)
            if isinstance(new, FoldedLinear):
                layer.to(new.weight.device, new.weight.dtype)
            setattr(module, name, layer)
        if old:
            setattr(self._model.base_model, FOLDED, None)

    def __enter__(self) -> "Fold":
        """Return the fold for a `with` block."""
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
    """Return the state of a folded model; None if it is not folded."""
    found: FoldState | None = getattr(model.base_model, FOLDED, None)
    return found


def expect_fold(model: "PreTrainedModel", policy: KVPolicy) -> FoldState | None:
    """Return the model's fold state, which must match the policy's basis, or None.

    Raises:
        ValueError: another basis is folded, or the same one from an older file.
    """
    found = folded_by(model)
    if found is None:
        return None
    if found.basis != policy.basis or policy.basis is None:
        raise ValueError(
            f"the model's projections are folded for {found.policy}, but {policy} stores vectors "
            "differently; restore the model first"
        )
    shape = cache_shape(model)
    if not same_maps(found.bound, [policy.basis.bind(i, shape) for i in range(shape.layers)]):
        raise ValueError(
            f"the model's projections are folded for {found.policy} as it was before its file "
            "changed; restore the model and fold it again"
        )
    return found


def expect_own_values(model: "PreTrainedModel") -> None:
    """Raise if a configuration says that values of a layer are not what its projection computes.

    Raises:
        UnsupportedModelError: layers read the values of others, and have output projections of
            their own, or the model clips values, which few tokens may not reveal.
    """
    if any(each.readers for each in layer_caches(model.config.get_text_config(decoder=True))):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers that read the values of others, so a basis cannot "
            "be folded into its projections; use the policy's cache without folding"
        )
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} clips values to {config.clip_qkv}, but folded, it would clip "
            "coordinates of a basis instead; use the policy's cache without folding"
        )


def _folded(
    found: Sequence[Projections], shape: CacheShape, state: FoldState, width: int
) -> list[tuple[int, str, FoldedLinear]]:
    """Return the folded projections of all layers, each with its layer and name."""
    new: list[tuple[int, str, FoldedLinear]] = []
    for i, (each, basis) in enumerate(zip(found, state.bound, strict=True)):
        if basis.value is not None and "values" in state.what:
            pairs = folded_values(each, widened(basis.value, width), i, state)
            new += [(i, name, layer) for name, layer in pairs]
        if basis.key is not None and "keys" in state.what:
            pairs = folded_keys(each, basis.key, shape.key_dim, state)
            new += [(i, name, layer) for name, layer in pairs]
    return new


def _is_rotary(model: "PreTrainedModel") -> bool:
    """Return whether a rotary embedding follows the query and key projections."""
    config = model.config.get_text_config(decoder=True)
    named = any("rotary" in name for name, _ in model.base_model.named_modules())
    return named or getattr(config, "rope_parameters", None) is not None


def _what(bound: Sequence[LayerBasis], rotary: bool) -> Folded:
    """Return what can be folded: values always, keys unless a rotary embedding follows them.

    Raises:
        UnsupportedModelError: nothing can be folded, or only a part.
    """
    values = any(basis.value is not None for basis in bound)
    found: Folded = frozenset({"values"}) if values else frozenset()
    if not rotary and any(basis.key is not None for basis in bound):
        if bound[0].together > 1:
            raise UnsupportedModelError(
                f"the policy stores {bound[0].together} KV heads together, which cannot be folded "
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
    """Return the layout by layer; models with a rotary embedding take packed values."""
    width, group = bases.stored.value_dim, bases.stored.group
    return tuple(
        Packing.of(rank, width, shape.value_dim, group, packed, device) for rank in bases.value_dims
    )


def foldable(model: "PreTrainedModel", layers: Sequence[int]) -> list[nn.Module]:
    """Return the modules with the projections of these layers.

    Raises:
        UnsupportedModelError: a layer has no projections with the usual names.
    """
    found = attention_modules(model, layers)
    for layer in layers:
        names = {name for name, _ in found[layer][1].named_children()} if layer in found else set()
        if "v_proj" not in names or not names & set(OUTPUT):
            raise UnsupportedModelError(
                f"layer {layer} of {type(model).__name__} has no projections called v_proj and "
                f"{' or '.join(OUTPUT)} (a fused one, perhaps), so a basis cannot be folded into "
                "them; its cache works without folding"
            )
    return [found[layer][1] for layer in layers]
