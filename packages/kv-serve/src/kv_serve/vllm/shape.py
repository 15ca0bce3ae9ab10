"""The attention layers of a vLLM model, and the shape of its cache on this device."""

from collections.abc import Sequence
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheSpec

from kv_policy import CacheShape, KVPolicy
from kv_runtime import AUTO, PolicyCache, Serving, checked_backend, joined_ropes, serving
from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.names import BACKEND, KEY
from kv_serve.vllm.served import ServesPolicy, UnderPolicy
from kv_transformers.models.mark import folded_with

PAGE_TOKENS: Final = 16  # of the pages of a self-check


def attention_layers(config: VllmConfig) -> list[Attention]:
    """Return a model's layers whose cache is under the policy, in execution order.

    They are those of `config.model_config`: a draft model has a configuration of its own, and its
    layers beside the others in vLLM's table.
    """
    layers = config.compilation_config.static_forward_context.values()
    under = [x for x in layers if isinstance(x, Attention) and isinstance(x.impl, UnderPolicy)]
    return [x for x in under if x.impl.config.model_config is config.model_config]


def kept_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return the blocks of the layers that vLLM keeps, by name: windows, chunks and states."""
    layers = config.compilation_config.static_forward_context.items()
    specs = {
        name: layer.get_kv_cache_spec(config)
        for name, layer in layers
        if isinstance(layer, AttentionLayerBase)
        and not isinstance(getattr(layer, "impl", None), UnderPolicy)
        and getattr(layer, "kv_sharing_target_layer_name", None) is None
    }
    return {name: spec for name, spec in specs.items() if spec is not None}


def is_whole(config: VllmConfig, window: int | None) -> bool:
    """Return whether a window is none, as it is not shorter than any request."""
    return window is None or window >= config.model_config.max_model_len


def check_alike(config: VllmConfig, layers: Sequence[Attention], *, in_pages: bool) -> None:
    """Raise if the layers of a model differ in what they store per token.

    Args:
        config: the engine's.
        layers: the layers with a cache.
        in_pages: whether tokens are stored in pages, counted by one account for all layers and
            heads; otherwise each layer has its own slots.

    Raises:
        UnservableError: a layer has no attention, or that of another backend, or differs from the
            first.
    """
    for each in config.compilation_config.static_forward_context.values():
        if isinstance(each, Attention) and not issubclass(each.attn_backend, ServesPolicy):
            raise UnservableError(
                f"a layer of this model uses {each.attn_backend.__name__}; a {KEY} cannot serve it"
            )
    first = _sizes(layers[0], in_pages=in_pages)
    for i, layer in enumerate(layers):
        for what, size in _sizes(layer, in_pages=in_pages).items():
            if size != first[what]:
                raise UnservableError(
                    f"layer {i} of this model has {size:g} {what}, and layer 0 has "
                    f"{first[what]:g}; this {KEY} needs equal layers: remove it from "
                    "additional_config"
                )


def _sizes(layer: Attention, *, in_pages: bool) -> dict[str, int | float]:
    dims = {
        "dimensions of a key": layer.head_size,
        "dimensions of a value": layer.head_size_v,
    }
    if not in_pages:
        return dims
    heads = {"KV heads": layer.num_kv_heads, "query heads": layer.num_heads}
    return {**heads, **dims, "as the scale of its attention": layer.impl.scale}


def model_shape(config: VllmConfig, layer: Attention) -> CacheShape:
    """Return the shape of the cache under the policy on this device, equal for its layers.

    It has the rotary embeddings if they have been found.
    """
    heads = layer.num_kv_heads
    first = first_heads(config)[get_tensor_model_parallel_rank()]
    ropes = [each.impl.rope for each in attention_layers(config)]
    return CacheShape(
        layers=len(attention_layers(config)),
        kv_heads=heads,
        group=layer.num_heads // heads,
        key_dim=layer.head_size,
        value_dim=layer.head_size_v,
        dtype=layer.kv_cache_torch_dtype,
        first_head=first,
        rope=None if None in ropes else joined_ropes(ropes),
        folded=folded_with(config.model_config.hf_config),
    )


def first_heads(config: VllmConfig) -> list[int]:
    """Return the first KV head of each rank; with more ranks than heads, ranks share heads."""
    ranks = config.parallel_config.tensor_parallel_size
    heads = config.model_config.get_total_num_kv_heads()
    return [rank * heads // ranks for rank in range(ranks)]


def named_backend(config: VllmConfig) -> Serving:
    """Return the backend that `kv_backend` in `additional_config` names, or the fastest."""
    return serving(config.device_config.device_type, config.additional_config.get(BACKEND, AUTO))


def backend_of(config: VllmConfig, policy: KVPolicy, shape: CacheShape) -> Serving:
    """Return the backend of attention and pages on this device.

    It is the one that is named, or the fastest that passes its self-check.
    """
    named = config.additional_config.get(BACKEND, AUTO)
    device = torch.device(config.device_config.device_type)
    name = checked_backend(device, named, policy, shape, PAGE_TOKENS, PolicyCache)
    return serving(device, name)
