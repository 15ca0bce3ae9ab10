"""Checks of whether a transformers model is supported, and the shape of its KV cache."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from kv_policy import CacheShape, KVPolicy
from kv_transformers.folded import FoldedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


FULL: Final = ("full_attention", "attention")  # layer types that attend to every token
OUTPUT: Final = ("o_proj", "out_proj", "dense")  # names of output projections in transformers
SCALES: Final = ("_scale", "_zero_point")  # parameters of quantizers that attention does not use
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
    """Return the shape of a model's KV cache.

    Raises:
        UnsupportedModelError: the model is not a decoder whose layers all attend to every token
            with their own keys and values, or its weights are not on one device.
    """
    name = type(model).__name__
    _expect_one_device(model)
    config = model.config.get_text_config(decoder=True)
    for reason in _reasons(model, config):
        raise UnsupportedModelError(f"{name} {reason}")
    sizes = {_sizes(each) for each in _by_layer(config)}
    if len(sizes) > 1:
        found = ", ".join(f"{kv} x {dim}" for _, kv, dim in sorted(sizes))
        raise UnsupportedModelError(
            f"{name} has layers with different KV heads ({found}); the cache supports models "
            "whose layers have the same shape"
        )
    ((heads, kv_heads, dim),) = sizes
    for reason in _module_reasons(model, config, kv_heads * dim, heads // kv_heads):
        raise UnsupportedModelError(f"{name} {reason}")
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        key_dim=dim,
        value_dim=dim,
        dtype=model.dtype if model.dtype.is_floating_point else torch.float32,
    )


def _by_layer(config: "PreTrainedConfig") -> "Sequence[PreTrainedConfig]":
    """Return the configuration of each layer if they differ; otherwise a single one."""
    by_layer: Sequence[PreTrainedConfig] = config.per_layer_config
    return by_layer if config.is_heterogeneous else (config,)


def _sizes(config: "PreTrainedConfig") -> tuple[int, int, int]:
    """Return query heads, KV heads and head dimension of a layer."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, dim


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

    if config.is_encoder_decoder:
        yield "has an encoder; only decoder-only models are supported"
    if has("add_cross_attention"):
        yield "attends to an encoder besides its own tokens; only decoder-only models are supported"
    if getattr(config, "is_causal", True) is False:
        yield "attends in both directions (is_causal=False); a compressed cache attends causally"
    if has("kv_lora_rank"):
        yield "has latent attention (MLA), whose cache has no keys and values per head"
    if has("attn_logit_softcapping"):
        yield "caps its attention logits, which paged attention does not support"
    if has("num_kv_shared_layers") or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        yield "shares keys and values between layers"
    own = getattr(model, "_supports_default_dynamic_cache", None)  # defined by generating models
    if own is not None and not own():
        yield "keeps its own kind of state instead of a cache of keys and values"
    layer = _by_layer(config)[0]
    missing = [name for name in SIZES if not isinstance(getattr(layer, name, None), int)]
    if missing:
        yield (
            f"is not one stack of layers: its configuration has no {missing[0]}, so there is no "
            "single cache to compress"
        )
        return
    other = sorted(set(layer_types(config)) - set(FULL))
    if other:
        yield (
            f"has layers of type {', '.join(other)}; the cache supports models whose layers all "
            f"attend to every token{_advice(config)}"
        )


def layer_types(config: "PreTrainedConfig") -> Sequence[str]:
    """Return transformers' types of a model's layers; a single one if all have the same type."""
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if types is not None:
        return types
    if getattr(config, "sliding_window", None):
        return ("sliding_attention",)
    return ("chunked_attention",) if getattr(config, "attention_chunk_size", None) else FULL[:1]


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
    model: "PreTrainedModel", config: "PreTrainedConfig", width: int, group: int
) -> Iterator[str]:
    """Yield the reasons in a model's modules why it is not supported.

    Args:
        model: the model.
        config: configuration of its decoder.
        width: dimensions of a token's keys in a layer, over all KV heads.
        group: query heads per KV head.
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
    for layer, named in sorted(at.items()):
        own = [each for each in named if not (says_cross(each[1]) or named_cross(each[0]))]
        attending = [each for each in own if _attends(each[1])]
        if len(own) < len(named) and not attending:
            yield f"attends in layer {layer} to something other than the layer's own tokens"
        if any(getattr(module, "is_causal", True) is False for _, module in own):
            yield f"attends in both directions in layer {layer}; a compressed cache is causal"
        for each in attending:
            yield from _attention_reasons(*each, width, group)


def _attends(module: nn.Module) -> bool:
    """Return whether a module is attention, by the conventions of transformers."""
    groups = getattr(module, "num_key_value_groups", None)
    return isinstance(groups, int) or any(name in OUTPUT for name, _ in module.named_children())


def _attention_reasons(name: str, module: nn.Module, width: int, group: int) -> Iterator[str]:
    own = [each for each, _ in module.named_parameters(recurse=False) if not each.endswith(SCALES)]
    if own:
        yield (
            f"uses parameters of {type(module).__name__} itself ({', '.join(own)}) in attention, "
            "which a compressed cache does not support"
        )
    theirs = getattr(module, "num_key_value_groups", group)
    if theirs != group:
        yield (
            f"has {theirs} query heads per KV head at {name}, but {group} in its configuration: "
            "it changes keys before attention, which a compressed cache does not support"
        )
    for child in ("k_proj", "v_proj"):
        projection = getattr(module, child, None)
        found = getattr(projection, "out_features", None)
        if isinstance(found, int) and found != width and not isinstance(projection, FoldedLinear):
            yield (
                f"has {found} dimensions in a token's {child[0].upper()} vectors at {name}, but "
                f"{width} by its configuration; heads that differ by layer, or between keys and "
                "values, are not supported"
            )


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
