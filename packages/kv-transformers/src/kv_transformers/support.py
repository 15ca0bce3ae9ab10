"""Checks of whether a transformers model is supported, and the shape of its KV cache."""

import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import nn

from kv_policy import CacheShape, KVPolicy
from kv_transformers.attention import CHOSEN, UNSERVED
from kv_transformers.folded import FoldedLinear
from kv_transformers.latents import EXPAND, INDEXER, LatentSizes, latent_reasons
from kv_transformers.layers import layer_caches
from kv_transformers.models.mark import folded_with

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


OUTPUT: Final = ("o_proj", "out_proj", "dense")  # names of output projections in transformers
SCALES: Final = ("_scale", "_zero_point")  # parameters of quantizers that attention does not use
SOFTCAP: Final = "attn_logit_softcapping"  # of configurations, whose modules pass it on
SINKS: Final = "sinks"  # of attention modules, which pass them to the attention function
OWN_MASK: Final = "_prepare_decoder_attention_mask"  # of decoders that make 4D masks themselves
INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"  # where transformers' modules find their function
# Options of attention functions that models which name them always give.
ALWAYS: Final = ("position_bias", "sinks")
SIZES: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size")


class UnsupportedModelError(ValueError):
    """The model needs an unsupported feature, named in the message."""


def expect_order(model: object, policy: object) -> None:
    """Raise if a cache's first two arguments are not a model and a policy.

    Raises:
        TypeError: they are not; the message shows the right call.
    """
    from transformers import PreTrainedModel

    swapped = isinstance(policy, PreTrainedModel)
    if isinstance(policy, str | KVPolicy) and not isinstance(model, str | KVPolicy):
        return
    was = f"{type(model).__name__} and {type(policy).__name__}"
    example = repr(model) if swapped and isinstance(model, str) else '"snapkv:budget=1024+k8v4"'
    raise TypeError(
        f"CompressedCache takes a transformers model and then a policy or its text, but {was} were "
        f"given; write CompressedCache(model, {example})"
    )


def cache_shape(model: "PreTrainedModel") -> CacheShape:
    """Return the shape of the keys and values that a policy stores: of layers of full attention.

    Raises:
        UnsupportedModelError: the model is not a decoder with layers that attend to every token,
            these layers differ in shape or do not have their own keys and values, or the model's
            weights are not on one device.
    """
    _expect_one_device(model)
    return stored_shape(model)


def stored_shape(model: "PreTrainedModel") -> CacheShape:
    """As `cache_shape`, of a model whose weights may be on the meta device.

    Raises:
        UnsupportedModelError: the model is not supported.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    for reason in _reasons(model, config):
        raise UnsupportedModelError(f"{name} {reason}")
    stored = [i for i, each in enumerate(layer_caches(config)) if each.index is not None]
    by_layer = config.per_layer_config
    sizes = {LayerSizes.of(by_layer[i]) for i in stored}
    if len(sizes) > 1:
        each_size = sorted({(each.kv_heads, each.key_dim) for each in sizes})
        found = ", ".join(f"{heads} x {dim}" for heads, dim in each_size)
        raise UnsupportedModelError(
            f"{name} has layers with different KV heads ({found}); the cache supports models "
            "whose layers of full attention have the same shape"
        )
    (size,) = sizes
    for reason in _module_reasons(model, config, size, stored):
        raise UnsupportedModelError(f"{name} {reason}")
    return CacheShape(
        layers=len(stored),
        kv_heads=size.kv_heads,
        group=size.heads // size.kv_heads,
        key_dim=size.key_dim,
        value_dim=size.value_dim,
        dtype=model.dtype if model.dtype.is_floating_point else torch.float32,
        value_in_key=size.latent is not None,
        folded=folded_with(model.config),
    )


def expect_shift_invariant(model: "PreTrainedModel", policy: KVPolicy) -> None:
    """Raise if attention changes with a constant that a basis subtracts from all keys of a head.

    Raises:
        UnsupportedModelError: the logits of a layer have a bound, or sinks.
    """
    config = model.config.get_text_config(decoder=True)
    capped = getattr(config, SOFTCAP, None) is not None
    if capped or any(getattr(each, SINKS, None) is not None for each in model.modules()):
        what = "a soft cap" if capped else "attention sinks"
        raise UnsupportedModelError(
            f"{policy} subtracts the mean key of each head, which changes the attention of "
            f"{type(model).__name__}, whose layers have {what}; use a basis without means, such as "
            "hadamard without a file"
        )


def expect_only_stored(model: "PreTrainedModel", policy: KVPolicy) -> None:
    """Raise if a model has layers that a policy does not store, whose states a replay would change.

    Raises:
        UnsupportedModelError: it has; the message names their types.
    """
    caches = layer_caches(model.config.get_text_config(decoder=True))
    other = sorted({each.kind for each in caches if each.keeps_own})
    if other:
        raise UnsupportedModelError(
            f"{policy} lets the model read each prompt again, and the layers of type "
            f"{', '.join(other)} in {type(model).__name__} would continue from a state that "
            "includes the first reading; use a policy that reads prompts once, such as kv-compress"
        )


class LayerSizes(NamedTuple):
    """Sizes of a layer's attention, as its configuration has them."""

    heads: int  # query heads
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: LatentSizes | None = None  # of latent attention: one KV head

    @classmethod
    def of(cls, config: "PreTrainedConfig") -> "LayerSizes":
        """Read the sizes of a layer from its configuration."""
        heads = config.num_attention_heads
        latent = LatentSizes.configured(config)
        if latent is not None:
            return cls(heads, 1, latent.rank + latent.rotated, latent.rank, latent)
        named = (getattr(config, name, None) for name in ("head_dim", "attention_head_dim"))
        dim = next((each for each in named if each), None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(heads, kv_heads, dim, getattr(config, "v_head_dim", None) or dim)

    @property
    def token_numbers(self) -> int:
        """Numbers that a token's keys and values have over the KV heads."""
        return self.kv_heads * (self.key_dim + (0 if self.latent else self.value_dim))


def _expect_one_device(model: "PreTrainedModel") -> None:
    """Raise if the weights are on several devices or on the meta device."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over {', '.join(sorted(devices))}; a compressed "
            "cache needs one device, so load the model onto one"
        )
    if devices == {"meta"}:
        raise UnsupportedModelError(
            f"{type(model).__name__} has its weights on the meta device: they are offloaded, or "
            "were never loaded; a compressed cache is on the device of the weights, so load the "
            "model onto one device without offloading"
        )


def _reasons(model: "PreTrainedModel", config: "PreTrainedConfig") -> Iterator[str]:
    """Yield the reasons in a model and its configuration why it is not supported."""

    def has(name: str) -> bool:
        return getattr(config, name, None) not in (None, 0, False)

    if config.is_encoder_decoder or model.config.is_encoder_decoder:
        yield "has an encoder; only decoder-only models are supported"
    if has("add_cross_attention"):
        yield "attends to an encoder besides its own tokens; only decoder-only models are supported"
    if getattr(config, "is_causal", True) is False:
        yield "attends in both directions (is_causal=False); a compressed cache attends causally"
    own = getattr(model, "_supports_default_dynamic_cache", None)  # defined by generating models
    if own is not None and not own():
        yield "keeps its own kind of state instead of a cache of keys and values"
    layer = config.per_layer_config[0] if config.is_heterogeneous else config
    missing = [name for name in SIZES if not isinstance(getattr(layer, name, None), int)]
    if missing:
        yield (
            f"is not one stack of layers: its configuration has no {missing[0]}, so there is no "
            "single cache to compress"
        )
        return
    caches = layer_caches(config)
    if any(each.latent and (each.has_state or each.readers) for each in caches):
        yield (
            "has latent attention beside a state in one layer, or layers that share latents, which "
            "is not supported"
        )
    if any(each.is_indexed and (each.readers or each.is_reader) for each in caches):
        yield (
            "has layers that share keys and values and attend to tokens that an indexer selects, "
            "which is not supported"
        )
    if all(each.index is None for each in caches):
        kinds = ", ".join(sorted({each.kind for each in caches}))
        yield (
            f"has only layers of type {kinds}; the cache compresses layers that attend to every "
            f"token, and this model has none{_advice(config)}"
        )


def _advice(config: "PreTrainedConfig") -> str:
    """Return the remedy if sliding windows are the only obstacle and can be disabled."""
    window = getattr(config, "sliding_window", None)
    stated = getattr(config, "layer_types", None) is not None  # independent of sliding_window
    if stated or not window or getattr(config, "attention_chunk_size", None):
        return ""
    return (
        f"; up to {window} tokens, prompt and answer together, no window applies, and a config "
        "with sliding_window=None computes the same"
    )


def _module_reasons(
    model: "PreTrainedModel", config: "PreTrainedConfig", size: LayerSizes, stored: Sequence[int]
) -> Iterator[str]:
    """Yield the reasons in a model's modules why it is not supported.

    Args:
        model: the model.
        config: configuration of its decoder.
        size: sizes of the layers that a policy stores.
        stored: their indices.
    """
    at: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.base_model.named_modules():
        index = getattr(module, "layer_idx", None)  # defined by transformers' attention modules
        if isinstance(index, int) and of_decoder(getattr(module, "config", config), config):
            at.setdefault(index, []).append((name, module))
    if not at:
        yield (
            "has no attention modules with a layer_idx, so a compressed cache cannot identify its "
            "layers"
        )
    for module in model.modules():
        if callable(getattr(type(module), OWN_MASK, None)):
            yield (
                f"makes 4D masks by code of its own in {type(module).__name__}, but a compressed "
                "cache takes a 2D mask that marks padding, from models that make masks by "
                "transformers' functions"
            )
    caches, latent, indexed = layer_caches(config), dict[str, nn.Module](), set[str]()
    for layer, named in ((layer, at[layer]) for layer in stored if layer in at):
        own = [each for each in named if not (says_cross(each[1]) or named_cross(each[0]))]
        attending = [each for each in own if _attends(each[1], beside=caches[layer].has_state)]
        if len(own) < len(named) and not attending:
            yield f"attends in layer {layer} to something other than the layer's own tokens"
        both = any(getattr(module, "is_causal", True) is False for _, module in own)
        # A generating model says in each mask what its prompt sees (PaliGemma, GIT).
        if both and not (model.can_generate() and getattr(config, "is_decoder", True)):
            yield f"attends in both directions in layer {layer}; a compressed cache is causal"
        for _, module in own:
            yield from _code_reasons(module)
        for each in attending:
            yield from _attention_reasons(*each, size)
        if size.latent is not None and len(attending) != 1:
            yield f"has latent attention, but {len(attending)} attention modules in layer {layer}"
        latent.update(attending)
        if caches[layer].is_indexed:
            indexed.update(name for name, _ in attending)
            yield from _indexed_reasons(model, attending)
    if size.latent is not None:
        yield from latent_reasons(latent, size.latent, indexed)


def _attends(module: nn.Module, *, beside: bool) -> bool:
    """Return whether a module is attention, by the conventions of transformers.

    Args:
        module: a module of a layer.
        beside: whether the layer has another mixer, which has an output projection, too.
    """
    groups = getattr(module, "num_key_value_groups", None)
    outputs = any(name in OUTPUT for name, _ in module.named_children())
    return isinstance(groups, int) or (outputs and not beside)


def _attention_reasons(name: str, module: nn.Module, size: LayerSizes) -> Iterator[str]:
    names = [each for each, _ in module.named_parameters(recurse=False)]
    own = [each for each in names if not (each.endswith(SCALES) or each == SINKS)]
    if own:
        yield (
            f"uses parameters of {type(module).__name__} itself ({', '.join(own)}) in attention, "
            "which a compressed cache does not support"
        )
    if size.latent is not None:
        return
    group = size.heads // size.kv_heads
    theirs = getattr(module, "num_key_value_groups", group)
    if theirs != group and not (theirs == 1 and _repeats(module)):
        yield (
            f"has {theirs} query heads per KV head at {name}, but {group} in its configuration: "
            "it changes keys before attention, which a compressed cache does not support"
        )
    widths = {"k_proj": size.kv_heads * size.key_dim, "v_proj": size.kv_heads * size.value_dim}
    for child, width in widths.items():
        projection = getattr(module, child, None)
        found = getattr(projection, "out_features", None)
        if isinstance(found, int) and found != width and not isinstance(projection, FoldedLinear):
            yield (
                f"has {found} dimensions in a token's {child[0].upper()} vectors at {name}, but "
                f"{width} by its configuration; heads that differ between layers of full attention "
                "are not supported"
            )


def _code_reasons(module: nn.Module) -> Iterator[str]:
    """Yield the reasons in the code of an attention module, before it runs."""
    kind = type(module)
    code = _code(kind)
    used = {name for each in code for name in each.co_names}
    if "update" in used and INTERFACE not in used:
        yield (
            f"has attention code of its own in {kind.__name__}, which does not call the attention "
            "function that it is configured for"
        )
    for option in (each for each in ALWAYS if each in _keywords(code)):
        yield f"uses {UNSERVED[option]} ({option}) in {kind.__name__}, which a cache cannot apply"


def _indexed_reasons(
    model: "PreTrainedModel", attending: Sequence[tuple[str, nn.Module]]
) -> Iterator[str]:
    """Yield the reasons why tokens that an indexer selects for latents do not reach attention."""
    for name, module in attending:
        if _is_silent(module) and not [*silent_indexers(model)]:
            yield (
                f"has latent attention at {name} to tokens that are selected (DSA), but neither is "
                f"{CHOSEN} of these tokens an argument of its attention function, nor has a layer "
                f"an {INDEXER} that gives them"
            )


def silent_indexers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the indexers of latent attention that hands on what they select as a mask alone.

    Its mask is as long as the keys that the model expands, of which our cache gives it few.
    """
    for module in model.modules():
        indexer = getattr(module, INDEXER, None)
        if isinstance(indexer, nn.Module) and _is_silent(module):
            yield indexer


def _is_silent(module: nn.Module) -> bool:
    return callable(getattr(module, EXPAND, None)) and CHOSEN not in _keywords(_code(type(module)))


def _repeats(module: nn.Module) -> bool:
    """Whether a module repeats tensors itself, as JetMoe its KV heads; attention sees how."""
    return any("repeat" in each.co_names for each in _code(type(module)))


def _code(kind: type) -> list[CodeType]:
    """Return the code of the methods of a class."""
    found = (inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each))
    return [each.__code__ for each in found]


def _keywords(code: Sequence[CodeType]) -> set[object]:
    """Return the keywords of calls in code, among other constants."""
    names = (const for each in code for const in each.co_consts if isinstance(const, tuple))
    return {name for each in names for name in each}


def of_decoder(config: "PreTrainedConfig", text: "PreTrainedConfig") -> bool:
    """Return whether a configuration is that of the decoder or of an enclosing model.

    Some models build their decoder from a copy of the configuration.
    """
    return type(config) is type(text) or config.get_text_config(decoder=True) is text


def says_cross(module: nn.Module) -> bool:
    """Return whether an attention module is marked as cross-attention."""
    return getattr(module, "is_cross_attention", False) is True


def named_cross(name: str) -> bool:
    """Return whether a name is one that transformers uses for cross-attention."""
    return "cross" in name or "encoder_attn" in name
