"""The attention layers of a vLLM model, and what its cache looks like on this device."""

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention

from kv_policy import CacheShape
from kv_serve.backends import serving


def attention_layers(config: VllmConfig) -> list[Attention]:
    """Give the layers that have a cache, in the order in which they run."""
    layers = config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, Attention)]


def model_shape(config: VllmConfig, layer: Attention) -> CacheShape:
    """Give the shape of the model's cache on this device; its layers are alike."""
    heads = layer.num_kv_heads
    first = first_heads(config)[get_tensor_model_parallel_rank()]
    return CacheShape(
        layers=config.model_config.get_num_layers(config.parallel_config),
        kv_heads=heads,
        group=layer.num_heads // heads,
        key_dim=layer.head_size,
        value_dim=layer.head_size_v,
        dtype=layer.kv_cache_torch_dtype,
        first_head=first,
    )


def first_heads(config: VllmConfig) -> list[int]:
    """Give the first KV head of each rank; ranks share heads where there are more ranks."""
    ranks = config.parallel_config.tensor_parallel_size
    heads = config.model_config.get_total_num_kv_heads()
    return [rank * heads // ranks for rank in range(ranks)]


def backend_of(config: VllmConfig) -> str:
    """Give the name of what attends on this device."""
    return serving(config.device_config.device_type).backend
