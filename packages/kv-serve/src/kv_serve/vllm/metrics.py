"""Metrics of a policy at vLLM's Prometheus endpoint."""

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
    "kv_bytes_per_token": "Bytes of stored keys and values per computed token.",
    "compression_ratio": "Uncompressed size of the tokens, over the bytes stored.",
}
SUMS: Final = {
    "tokens_computed": "Computed tokens of the requests that hold pages.",
    "tokens_kept": "Kept tokens of these requests, averaged over layers and KV heads.",
    "pages_used": "Pages of requests, over all workers.",
    "pages_free": "Free pages, over all workers.",
    "prefix_bytes": "Bytes of stored prefixes, over all workers; memory is taken from them first.",
}
COUNTERS: Final = {
    "compression_passes": "Eviction plans, each over some requests and all layers.",
    "compression_seconds": "Host seconds in compression passes, in the slowest worker.",
    "tokens_dropped": "Evicted tokens, averaged over layers and KV heads.",
    "bytes_saved": "Bytes saved against an uncompressed cache, each request at its peak.",
    "prefix_hits": "Requests that continued a stored prefix.",
    "prefix_tokens": "Tokens of stored prefixes that requests did not read again.",
}


class PolicyStats(KVConnectorStats):
    """The fields of one `Measured`, or nothing, sent to the server's process."""

    @classmethod
    def of(cls, measured: Measured) -> "PolicyStats":
        """Return the statistics of one `Measured`."""
        return cls(data=asdict(measured))

    def reset(self) -> None:
        """Clear the statistics."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Append a later measurement; the workers' measurements are already summed."""
        if not self.data or not other.data:
            return type(self)(data=self.data or other.data)
        return self.of(Measured(**self.data).then(Measured(**other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Return the values that vLLM writes to its log."""
        measured = Measured(**self.data)
        return {
            name: round(each, 3) for name, each in (measured.gauges() | measured.counters()).items()
        }

    def is_empty(self) -> bool:
        """Return whether nothing was measured."""
        return not self.data


def labels(config: "VllmConfig", engines: dict[int, list[object]]) -> dict[int, list[object]]:
    """Add the policy to the label values of each engine."""
    policy = str(parse(config.additional_config[KEY]))
    return {engine: [*values, policy] for engine, values in engines.items()}


class PolicyMetrics(KVConnectorPromMetrics):
    """Gauges and counters of a policy whose tokens are stored in pages."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the metrics; vLLM passes the arguments."""
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
        """Record the measurements of an engine."""
        measured = Measured(**transfer_stats_data)
        for name, value in measured.gauges().items():
            self._gauges[name][engine_idx].set(value)
        for name, value in measured.counters().items():
            self._counters[name][engine_idx].inc(value)


def gauge(kind: type, name: str, said: str, labelnames: list[str]) -> Any:
    """Register a gauge; with several server processes, the most recent value counts."""
    return kind(
        name=PREFIX + name,
        documentation=said,
        labelnames=labelnames,
        multiprocess_mode="mostrecent",
    )
