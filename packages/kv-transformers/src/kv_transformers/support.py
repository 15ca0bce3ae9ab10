"""Which models of transformers the cache serves, and the shape of their KV cache."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from kv_policy import CacheShape, KVPolicy
from kv_transformers.folded import FoldedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


FULL: Final = ("full_attention", "attention")  # types of layers that attend to every token
OUTPUT: Final = ("o_proj", "out_proj", "dense")  # what transformers calls output projections
SCALES: Final = ("_scale", "_zero_point")  # parameters of quantizers that attention does not read
SIZES: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size")


class UnsupportedModelError(ValueError):
    """The model needs something a compressed cache does not do; the message says what."""


def expect_order(model: object, policy: object) -> None:
    """Refuse a cache's first two arguments where they are no model and no policy.

    Raises:
        TypeError: they are not; the message says how they are given.
    """
    from transformers import PreTrainedModel

    swapped = isinstance(policy, PreTrainedModel)
    if isinstance(policy, str | KVPolicy) and not isinstance(model, str | KVPolicy):
        return
    was = f"{type(model).__name__} and {type(policy).__name__}"
    example = repr(model) if swapped and isinstance(model, str) else '"snapkv:budget=1024+k8v4"'
    raise TypeError(
        f"a compressed cache is made of a model of transformers and then a policy or its text, and "
        f"{was} were given; write CompressedCache(model, {example})"
    )


def cache_shape(model: "PreTrainedModel") -> CacheShape:
    """Give the shape of a model's KV cache.

    Raises:
        UnsupportedModelError: the model is not a decoder whose layers all attend to every token
            with keys and values of their own, or its weights are not on one device.
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
            f"{name} has layers with KV heads of several sorts ({found}); the cache serves models "
            "whose layers are alike"
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
    """The configuration of each layer, where they differ; else the one of all."""
    by_layer: Sequence[PreTrainedConfig] = config.per_layer_config
    return by_layer if config.is_heterogeneous else (config,)


def _sizes(config: "PreTrainedConfig") -> tuple[int, int, int]:
    """Query heads, KV heads and dimensions of a layer."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, dim


def _expect_one_device(model: "PreTrainedModel") -> None:
    """Refuse weights on several devices, or on none while the model does not run."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over {', '.join(sorted(devices))}; a compressed "
            "cache lives on one device, so load the model onto one"
        )
    if devices == {"meta"}:
        raise UnsupportedModelError(
            f"{type(model).__name__} has its weights on the meta device: they are offloaded, or "
            "were never loaded; a compressed cache lives where the weights are, so load the model "
            "onto one device without offloading"
        )


def _reasons(model: "PreTrainedModel", config: "PreTrainedConfig") -> Iterator[str]:
    """Why a model is not served, as far as it and its configuration say."""

    def has(name: str) -> bool:
        return getattr(config, name, None) not in (None, 0, False)

    if config.is_encoder_decoder:
        yield "has an encoder; only decoder-only models are served"
    if has("add_cross_attention"):
        yield "attends to an encoder beside its own tokens; only decoder-only models are served"
    if getattr(config, "is_causal", True) is False:
        yield "attends in both directions (is_causal=False); a compressed cache attends causally"
    if has("kv_lora_rank"):
        yield "has latent attention, whose cache has no keys and values of its own"
    if has("attn_logit_softcapping"):
        yield "caps its attention logits, which paged attention does not"
    if has("num_kv_shared_layers") or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        yield "shares keys and values between layers"
    own = getattr(model, "_supports_default_dynamic_cache", None)  # generating models have it
    if own is not None and not own():
        yield "keeps a state of a kind of its own in place of a cache of keys and values"
    layer = _by_layer(config)[0]
    missing = [name for name in SIZES if not isinstance(getattr(layer, name, None), int)]
    if missing:
        yield (
            f"is not one stack of layers: its configuration has no {missing[0]}, so there is no "
            "one cache to compress"
        )
        return
    other = sorted(set(layer_types(config)) - set(FULL))
    if other:
        yield (
            f"has layers of type {', '.join(other)}; the cache serves models whose layers all "
            f"attend to every token{_advice(config)}"
        )


def layer_types(config: "PreTrainedConfig") -> Sequence[str]:
    """The types of a model's layers, as transformers names them; one for all if they are alike."""
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if types is not None:
        return types
    if getattr(config, "sliding_window", None):
        return ("sliding_attention",)
    return ("chunked_attention",) if getattr(config, "attention_chunk_size", None) else FULL[:1]


def _advice(config: "PreTrainedConfig") -> str:
    """What can be done where windows are all that is in the way, and the config turns them off."""
    window = getattr(config, "sliding_window", None)
    stated = getattr(config, "layer_types", None) is not None  # whatever the window is
    if stated or not window or getattr(config, "attention_chunk_size", None):
        return ""
    return (
        f"; up to {window} tokens, prompt and answer together, no window applies, and a config "
        "with sliding_window=None computes the same"
    )


def _module_reasons(
    model: "PreTrainedModel", config: "PreTrainedConfig", width: int, group: int
) -> Iterator[str]:
    """Why a model is not served, as its modules tell.

    Args:
        model: whose modules.
        config: of its decoder.
        width: numbers of a token's keys in a layer.
        group: query heads of a KV head.
    """
    at: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.base_model.named_modules():
        index = getattr(module, "layer_idx", None)  # as transformers' attention modules have it
        if isinstance(index, int) and of_decoder(getattr(module, "config", config), config):
            at.setdefault(index, []).append((name, module))
    if not at:
        yield (
            "has no attention modules that say which layer they are of (layer_idx), so there is "
            "nothing that a compressed cache could follow"
        )
    for layer, named in sorted(at.items()):
        own = [each for each in named if not (says_cross(each[1]) or named_cross(each[0]))]
        attending = [each for each in own if _attends(each[1])]
        if len(own) < len(named) and not attending:
            yield f"attends in layer {layer} to something else than the layer's own tokens"
        if any(getattr(module, "is_causal", True) is False for _, module in own):
            yield f"attends in both directions in layer {layer}; a compressed cache is causal"
        for each in attending:
            yield from _attention_reasons(*each, width, group)


def _attends(module: nn.Module) -> bool:
    """Whether a module is attention, as models of transformers write it."""
    groups = getattr(module, "num_key_value_groups", None)
    return isinstance(groups, int) or any(name in OUTPUT for name, _ in module.named_children())


def _attention_reasons(name: str, module: nn.Module, width: int, group: int) -> Iterator[str]:
    own = [each for each, _ in module.named_parameters(recurse=False) if not each.endswith(SCALES)]
    if own:
        yield (
            f"attends by parameters of {type(module).__name__} itself ({', '.join(own)}), which "
            "a compressed cache does not know"
        )
    theirs = getattr(module, "num_key_value_groups", group)
    if theirs != group:
        yield (
            f"attends at {name} with {theirs} query heads to a KV head, and its configuration says "
            f"{group}: it changes keys on their way to attention, which a compressed cache cannot "
            "follow"
        )
    for child in ("k_proj", "v_proj"):
        projection = getattr(module, child, None)
        found = getattr(projection, "out_features", None)
        if isinstance(found, int) and found != width and not isinstance(projection, FoldedLinear):
            yield (
                f"has {found} numbers in a token's {child[0].upper()} vectors at {name}, and its "
                f"configuration says {width}; heads that differ by layer, or between keys and "
                "values, are not served"
            )


def of_decoder(config: "PreTrainedConfig", text: "PreTrainedConfig") -> bool:
    """Whether a module's configuration is that of the decoder, or of a model around it.

    Some models build their decoder from a copy of the configuration.
    """
    return type(config) is type(text) or config.get_text_config(decoder=True) is text


def says_cross(module: nn.Module) -> bool:
    """Whether an attention module says itself that it attends to something else."""
    return getattr(module, "is_cross_attention", False) is True


def named_cross(name: str) -> bool:
    """Whether a name is one that transformers gives to cross-attention."""
    return "cross" in name or "encoder_attn" in name
