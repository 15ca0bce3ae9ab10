"""Metrics of a plain format, computed from the model's shape rather than counted."""

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Gauge
from vllm.v1.metrics.utils import create_metric_per_engine

from kv_policy import CacheShape, parse
from kv_serve.vllm.config import plain_format
from kv_serve.vllm.metrics import RATIOS, gauge, labels
from kv_serve.vllm.middleware import App, Message, Receive, Send
from kv_serve.vllm.names import KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PATH: Final = "kv_serve.vllm.plain.PlainMetrics"


class PlainMetrics:
    """ASGI middleware that sets the gauges of a plain format once, when the server starts.

    A connector could report them, but it changes the scheduler's code paths, and these two numbers
    never change.
    """

    def __init__(self, app: App) -> None:
        """Wrap `app`."""
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Set the gauges at the lifespan event, and forward every event."""
        if scope["type"] == "lifespan":
            state = scope["app"].state
            manager = state.engine_client.logger_manager
            if manager is not None:  # None: metrics are disabled
                announce(state.vllm_config, manager.engine_indexes)
        await self.app(scope, receive, send)


def announce(config: "VllmConfig", engines: list[int]) -> None:
    """Set the gauges of a policy with one format for all tokens; ignore any other or none."""
    text = config.additional_config.get(KEY)
    if text is None:
        return
    shape = whole_shape(config)
    format = plain_format(parse(text), shape)
    if format is None:
        return
    held = shape.layers * shape.kv_heads * format.nbytes
    values = {
        "kv_bytes_per_token": held,
        "compression_ratio": shape.token_bytes / held,
    }
    model = config.model_config.served_model_name
    known: dict[int, list[object]] = {engine: [model, str(engine)] for engine in engines}
    names = ["model_name", "engine", "policy"]
    for name, value in values.items():
        metric = gauge(Gauge, name, RATIOS[name], names)
        for each in create_metric_per_engine(metric, labels(config, known)).values():
            each.set(value)


def _full_layers(config: "VllmConfig") -> int:
    """Count the layers under the policy: those that attend to all tokens."""
    model = config.model_config
    kinds = getattr(model.hf_text_config, "layer_types", None)
    if kinds is None:
        return int(model.get_num_layers_by_block_type(config.parallel_config))
    return sum(kind in ("full_attention", "attention") for kind in kinds)


def whole_shape(config: "VllmConfig") -> CacheShape:
    """Return the shape of the cache under a policy over all devices.

    Replicated heads count repeatedly.
    """
    model, parallel = config.model_config, config.parallel_config
    heads: Any = model.get_num_kv_heads(parallel)
    dim, text = model.get_head_size(), model.hf_text_config
    value_dim = text.kv_lora_rank if model.use_mla else getattr(text, "v_head_dim", None)
    return CacheShape(
        layers=_full_layers(config),
        kv_heads=heads * parallel.tensor_parallel_size,
        group=model.get_num_attention_heads(parallel) // heads,
        key_dim=dim,
        value_dim=value_dim or dim,
        dtype=model.dtype,
        value_in_key=model.use_mla,
    )
