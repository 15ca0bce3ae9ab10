"""Which models of transformers the cache serves, and the shape of their KV cache."""

from typing import TYPE_CHECKING

import torch

from kv_policy import CacheShape, KVPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


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
            with keys and values of their own.
    """
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over {', '.join(sorted(devices))}; a compressed "
            "cache lives on one device, so load the model onto one"
        )
    config = model.config.get_text_config(decoder=True)
    _refuse(config, type(model).__name__)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        key_dim=dim,
        value_dim=dim,
        dtype=model.dtype if model.dtype.is_floating_point else torch.float32,
    )


def _refuse(config: "PreTrainedConfig", model: str) -> None:
    def has(name: str) -> bool:
        return getattr(config, name, None) not in (None, 0, False)

    reasons = {
        "has an encoder; only decoder-only models are served": config.is_encoder_decoder,
        "has latent attention, whose cache has no keys and values of its own": has("kv_lora_rank"),
        "caps its attention logits, which paged attention does not": has("attn_logit_softcapping"),
        "shares keys and values between layers": has("num_kv_shared_layers")
        or has("kv_sharing_modes"),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"{model} {reason}")
    types = getattr(config, "layer_types", None)
    if types is None:
        limited = has("sliding_window") or has("attention_chunk_size")
        types = ["sliding_attention" if limited else "full_attention"]
    other = sorted(set(types) - {"full_attention", "attention"})
    if other:
        raise UnsupportedModelError(
            f"{model} has layers of type {', '.join(other)}; the cache serves models whose layers "
            "all attend to every token (a config with sliding_window=None, if the model allows it)"
        )
