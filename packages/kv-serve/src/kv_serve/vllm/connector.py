"""The KV connector between scheduler and workers: a step's requests, and the pages they hold."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kv_runtime import RequestRows
from kv_serve.vllm import boundaries, failures, older
from kv_serve.vllm.attach import is_heard, stores_prefixes
from kv_serve.vllm.config import served_policy
from kv_serve.vllm.documents import documents
from kv_serve.vllm.drafters import check_first, leading
from kv_serve.vllm.memory import Memory
from kv_serve.vllm.messages import StepMetadata, WorkerReport
from kv_serve.vllm.metrics import PolicyMetrics, PolicyStats
from kv_serve.vllm.names import TURNS
from kv_serve.vllm.scheduler_state import SchedulerState
from kv_serve.vllm.spec import PagedSpec
from kv_serve.vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PagesConnector(
    failures.EndsRequests,
    boundaries.StopsRequests,
    KVConnectorBase_V1,
    SupportsHMA,
    older.AskedFirst,
):
    """Sends `StepMetadata` to workers and `WorkerReport` back; it transfers no keys or values."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Create the scheduler's or the worker's side, as vLLM requests."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._policy = served_policy(vllm_config)
        self._ledger: SchedulerState | None = None
        self._worker: Worker | None = None
        self._stats: KVConnectorStats | None = None  # since the last call of get_kv_connector_stats

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no KV data is delivered."""
        return False

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Create the worker over the memory that vLLM allocated.

        Raises:
            UnservableError: vLLM has placed layers otherwise.
        """
        assert self._kv_cache_config is not None, "vLLM passes it to every connector"
        groups = self._kv_cache_config.kv_cache_groups
        check_first(leading(self._vllm_config), groups[0].layer_names)
        memory = Memory.of(self._kv_cache_config, kv_caches)
        kept = [each for each in groups if not isinstance(each.kv_cache_spec, PagedSpec)]
        self._worker = Worker.over(self._vllm_config, self._policy, memory, kept)

    @property
    def worker(self) -> Worker:
        """The state of this worker."""
        assert self._worker is not None, "vLLM registers its memory before the first step"
        return self._worker

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._worker is not None and self._worker.metadata is not None

    def expect(self, rows: RequestRows) -> None:
        """Keep the rows that vLLM has built for the step that begins next."""
        if self._worker is not None:
            self._worker.rows = rows

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step; vLLM has built its metadata, and calls this before it launches a graph."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self.worker.begin(connector_metadata)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the requests that failed in the worker.

        vLLM calls this for blocks that could not be loaded, and fails their requests. Ours are
        identified by their negated serials, which are never block numbers; see `failures`.
        """
        return {-serial for serial in self.worker.failures()}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        """End a step."""
        return self.worker.end()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Do nothing: nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: nothing is saved."""

    def wait_for_save(self) -> None:
        """End the forward pass, which may have been a graph.

        vLLM calls this first after it; under speculative decoding after the drafts, which come
        after the end of the step.
        """
        if self.in_step:
            self.worker.finish()
        if self._worker is not None:
            self._worker.settle()

    # The scheduler's side.

    @property
    def scheduler_state(self) -> SchedulerState:
        """The scheduler's state of requests."""
        assert self._ledger is not None, "vLLM binds its cache manager before the first step"
        return self._ledger

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Find the manager that allocates blocks for requests.

        Raises:
            UnservableError: the memory is too small for a prompt of the longest length.
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        longest = self._vllm_config.model_config.max_model_len
        failures.watch()
        boundaries.watch()
        groups = kv_cache_manager.kv_cache_config.kv_cache_groups
        kept = [x.kv_cache_spec for x in groups if not isinstance(x.kv_cache_spec, PagedSpec)]
        each = (-(-x.max_memory_usage_bytes(self._vllm_config) // x.page_size_bytes) for x in kept)
        turns = bool(self._vllm_config.additional_config.get(TURNS))
        speculative = self._vllm_config.speculative_config
        self._ledger = SchedulerState.over(
            self._policy,
            kv_cache_manager,
            longest,
            sum(each),
            stores=stores_prefixes(self._vllm_config, plain=False),
            turns=turns,
            workers=self._vllm_config.parallel_config.tensor_parallel_size,
            loaded=documents(self._vllm_config, self._policy),
            drafts=0 if speculative is None else speculative.num_speculative_tokens,
        )

    def failed(self, told: Collection[int]) -> set[str]:
        """Return the requests that failed in workers, from the numbers vLLM treats as blocks."""
        return self.scheduler_state.failed({-each for each in told})

    def on_new_request(self, request: "Request") -> None:
        """Read the request's budget."""
        self.scheduler_state.welcome(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens of a stored prefix that the request continues.

        None: it waits for another request that is about to store them.
        """
        return self.scheduler_state.match(request), False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Do nothing: nothing is loaded from elsewhere."""

    def stop(self, request: "Request", computed: int, tokens: int) -> int:
        """Return how many of a request's next tokens come before its boundary."""
        return self.scheduler_state.stop(request.request_id, computed, tokens)

    def reset_cache(self) -> bool:
        """Drop all stored prefixes, for example before the engine sleeps."""
        self.scheduler_state.manager.reset_prefixes()
        return True

    def has_pending_block_frees(self) -> bool:
        """Return whether compression may free blocks, so that vLLM postpones preemption."""
        return self.scheduler_state.ask()

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the metadata of the step."""
        return self.scheduler_state.metadata(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Record the reported pages, and free the blocks that requests do not need."""
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, WorkerReport):
            self.scheduler_state.note(reports)
            if reports.measured is not None and is_heard(self._vllm_config):
                later = PolicyStats.of(self.scheduler_state.with_prefixes(reports.measured))
                self._stats = later if self._stats is None else self._stats.aggregate(later)

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """Return the workers' measurements; the workers' side returns None."""
        stats, self._stats = self._stats, None
        return stats

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return False: the request's blocks may be freed at once."""
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return False: the request's blocks may be freed at once."""
        self.scheduler_state.keep(request)
        self.scheduler_state.finished(request.request_id)
        return False, None

    # The side of the process that serves metrics.

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        """Rebuild the statistics from the transmitted data."""
        return PolicyStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        """Register the Prometheus metrics; none for an attached connector, which sends none."""
        if not is_heard(vllm_config):
            return None
        return PolicyMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


@dataclass(frozen=True, slots=True)
class PageLayer:
    """Attention of a layer, computed by this process's worker."""

    index: int
    softcap: float | None = None  # the bound of the layer's logits
    sinks: Float[Tensor, " Q"] | None = field(default=None, compare=False)

    def forward(
        self,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        cache: Tensor,
        step: RequestRows,
        output: Float[Tensor, "m Q Dv"],
        *,
        stored: bool = False,
        more: bool = False,
    ) -> None:
        """Store the new tokens of a step and write their attention to `output`.

        `stored` and `more` as for `SlotLayer.forward`; the tokens are stored after the last layer
        that attends to them.

        Without a step of the connector the output is zero: vLLM runs the model on made-up tokens
        while it profiles, warms up and captures graphs, before its connector exists or while it is
        disabled. A step whose tokens did not come here is an error at its end.

        Where vLLM captures a decode step, what is launched is for any step.
        """
        connector = connector_of_worker()
        if connector is not None and step.captured:
            connector.worker.requests.capture(
                self.index, query, key, value, output, self.softcap, self.sinks, more=more
            )
            return
        if connector is None or not connector.in_step:
            output.zero_()
            return
        connector.worker.requests.attend(
            self.index, step, query, key, value, output, self.softcap, self.sinks, more=more
        )


def connector_of_worker() -> PagesConnector | None:
    """Return the connector of this process's worker; None before it exists or while disabled."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    assert connector is None or isinstance(connector, PagesConnector), "ours is configured"
    return connector
