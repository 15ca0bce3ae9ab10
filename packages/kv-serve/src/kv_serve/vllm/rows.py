"""The rows of a step's tensors per request, from vLLM's attention metadata."""

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from kv_runtime import RequestRows


class RowsBuilder(AttentionMetadataBuilder[RequestRows]):
    """Builds the rows of requests from vLLM's metadata of a step.

    A request's key is the number of its first block. It is read from the device, which waits for
    all before it, only where requests may have begun: the GPU model runner gives an index to each
    when it begins or resumes, and a request with a new index computes its prompt first.
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

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RequestRows:
        """Return the rows of one step."""
        given = common_attn_metadata
        start = given.query_start_loc_cpu[: given.num_reqs + 1]
        return RequestRows(self._keys(given), tuple(start.tolist()))

    def _keys(self, given: CommonAttentionMetadata) -> tuple[int, ...]:
        first: Tensor = given.block_table_tensor[: given.num_reqs, 0]
        if given.req_idx is None or given.is_prefilling is None:  # as in other model runners
            return tuple(first.tolist())
        index = given.req_idx[: given.num_reqs].tolist()
        begun = bool(given.is_prefilling[: given.num_reqs].any())
        if begun or not self.first.keys() >= {*index}:
            self.first |= zip(index, first.tolist(), strict=True)
        return tuple(self.first[each] for each in index)
