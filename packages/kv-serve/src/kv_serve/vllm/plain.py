"""The metrics of a plain format: they follow from arithmetic, so no engine counts them."""

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
    """ASGI middleware that sets the gauges of a plain format once, when the server begins.

    A connector could report them, but an engine with one takes other ways through the scheduler,
    for two numbers that never change.
    """

    def __init__(self, app: App) -> None:
        """Stand in front of `app`."""
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        if scope["type"] == "lifespan":
            state = scope["app"].state
            manager = state.engine_client.logger_manager
            if manager is not None:  # vLLM was told to have no metrics
                announce(state.vllm_config, manager.engine_indexes)
        await self.app(scope, receive, send)


def announce(config: "VllmConfig", engines: list[int]) -> None:
    """Set the gauges of a policy with one format for all tokens; for another, or none, nothing."""
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


def whole_shape(config: "VllmConfig") -> CacheShape:
    """Give the shape of a model's cache over all devices, heads that several hold counted often."""
    model, parallel = config.model_config, config.parallel_config
    heads: Any = model.get_num_kv_heads(parallel)
    dim = model.get_head_size()
    return CacheShape(
        layers=model.get_num_layers(parallel),
        kv_heads=heads * parallel.tensor_parallel_size,
        group=model.get_num_attention_heads(parallel) // heads,
        key_dim=dim,
        value_dim=getattr(model.hf_text_config, "v_head_dim", None) or dim,
        dtype=model.dtype,
    )
