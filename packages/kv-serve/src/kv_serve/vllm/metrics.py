"""What vLLM's Prometheus endpoint says of a policy."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kv_policy import parse
from kv_runtime import Measured
from kv_serve.vllm.names import KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX: Final = "vllm:kv_serve_"
RATIOS: Final = {
    "kv_bytes_per_token": "Bytes of keys and values held for requests, per token computed.",
    "compression_ratio": "Bytes that the tokens would take uncompressed, over the bytes held.",
}
SUMS: Final = {
    "tokens_computed": "Tokens computed of the requests for which something is held.",
    "tokens_kept": "Tokens kept of these, as the mean over layers and KV heads.",
    "pages_used": "Pages in use, over all workers.",
    "pages_free": "Pages that are free, over all workers.",
}
COUNTERS: Final = {
    "compression_passes": "Plans of which tokens stay, each over some requests and all layers.",
    "compression_seconds": "Seconds of the host in those, in the slowest worker.",
    "tokens_dropped": "Tokens dropped of requests, as the mean over layers and KV heads.",
    "bytes_saved": "Bytes that requests held less than uncompressed, each at its most.",
}


class PolicyStats(KVConnectorStats):
    """The fields of one `Measured`, or nothing, on their way to the process of the server."""

    @classmethod
    def of(cls, measured: Measured) -> "PolicyStats":
        """Send what was counted."""
        return cls(data=asdict(measured))

    def reset(self) -> None:
        """Forget it."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Let a later count follow; what workers have side by side was added up before."""
        if not self.data or not other.data:
            return type(self)(data=self.data or other.data)
        return self.of(Measured(**self.data).then(Measured(**other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Give what vLLM writes to its log."""
        measured = Measured(**self.data)
        return {
            name: round(each, 3) for name, each in (measured.gauges() | measured.counters()).items()
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def labels(config: "VllmConfig", engines: dict[int, list[object]]) -> dict[int, list[object]]:
    """Add the policy to what vLLM says of each engine."""
    policy = str(parse(config.additional_config[KEY]))
    return {engine: [*values, policy] for engine, values in engines.items()}


class PolicyMetrics(KVConnectorPromMetrics):
    """Gauges and counters of a policy whose tokens lie in pages."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register them; vLLM gives the arguments."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = [*labelnames, "policy"]
        values = labels(vllm_config, per_engine_labelvalues)
        self._gauges = {
            name: create_metric_per_engine(gauge(metric_types[Gauge], name, said, names), values)
            for name, said in (RATIOS | SUMS).items()
        }
        counter = metric_types[Counter]
        self._counters = {
            name: create_metric_per_engine(
                counter(name=PREFIX + name, documentation=said, labelnames=names), values
            )
            for name, said in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take note of what an engine counted."""
        measured = Measured(**transfer_stats_data)
        for name, value in measured.gauges().items():
            self._gauges[name][engine_idx].set(value)
        for name, value in measured.counters().items():
            self._counters[name][engine_idx].inc(value)


def gauge(kind: type, name: str, said: str, labelnames: list[str]) -> Any:
    """Register a gauge; of several processes of a server, the last to know is right."""
    return kind(
        name=PREFIX + name,
        documentation=said,
        labelnames=labelnames,
        multiprocess_mode="mostrecent",
    )
