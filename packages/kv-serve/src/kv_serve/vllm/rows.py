"""The rows of a step's tensors per request, from vLLM's attention metadata."""

from typing import cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from kv_runtime import RequestRows
from kv_serve.vllm import page_graphs
from kv_serve.vllm.adapters import indexes_requests
from kv_serve.vllm.connector import PagesConnector, connector_of_worker
from kv_serve.vllm.spec import PagedSpec


class RowsBuilder(AttentionMetadataBuilder[RequestRows]):
    """Builds the rows of requests from vLLM's metadata of a step.

    A request's key is the number of its first block. It is read from the device, which waits for
    all before it, only where requests may have begun: the GPU model runner gives an index to each
    when it begins or resumes, and a request with a new index computes its prompt first. vLLM 0.29
    does not tell the index, so the key is read in each step.

    The worker gets the rows before the forward pass, which may be a captured one.
    """

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Create the builder; vLLM passes the arguments."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.first: dict[int, int] = {}  # first blocks, by the runner's index of a request
        self.connector: PagesConnector | None = None  # once a step is captured
        self.reserved: Tensor | None = None  # while vLLM measures the memory that graphs take

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Return that decode steps can be captured, if nothing in them needs the host."""
        return page_graphs.support(vllm_config, cast(PagedSpec, kv_cache_spec))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RequestRows:
        """Return the rows of one step; requests that pad a graph are omitted."""
        given = common_attn_metadata
        start = given.query_start_loc_cpu[: given.num_reqs + 1].tolist()
        count = given.num_reqs
        while count > 1 and start[count] == start[count - 1]:
            count -= 1
        rows = RequestRows(self._keys(given, count), tuple(start[: count + 1]))
        connector = connector_of_worker()
        if connector is not None:
            connector.expect(rows)
        return rows

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> RequestRows:
        """Return the rows of a decode step that is captured, which are of no request.

        vLLM calls this also before it launches a graph without requests, where the connector is
        disabled: then the tokens of the last step must not be stored again.

        The state of decoding requests gets memory of fixed addresses at the first call. There is
        none yet while vLLM measures the memory for graphs, so as many bytes are taken in its place.
        """
        self.connector = connector_of_worker() or self.connector
        config = self.vllm_config
        if self.connector is not None:
            requests = config.scheduler_config.max_num_seqs
            self.connector.worker.requests.fix(requests, config.model_config.max_model_len)
        elif self.reserved is None:
            layout = page_graphs.layout_of(config, cast(PagedSpec, self.kv_cache_spec))
            size = sum(page_graphs.memory_of(config, layout))
            self.reserved = torch.empty(size, dtype=torch.uint8, device=self.device)
        return RequestRows((), (0,), captured=True)

    def _keys(self, given: CommonAttentionMetadata, count: int) -> tuple[int, ...]:
        first: Tensor = given.block_table_tensor[:count, 0]
        found = given.req_idx if indexes_requests() else None
        if found is None or given.is_prefilling is None:  # as in other model runners
            return tuple(first.tolist())
        index = found[:count].tolist()
        begun = bool(given.is_prefilling[:count].any())
        if begun or not self.first.keys() >= {*index}:
            self.first |= zip(index, first.tolist(), strict=True)
        return tuple(self.first[each] for each in index)
