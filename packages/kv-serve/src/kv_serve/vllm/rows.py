"""The rows of a step's tensors per request, from vLLM's attention metadata."""

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from kv_runtime import RequestRows


class RowsBuilder(AttentionMetadataBuilder[RequestRows]):
    """Builds the rows of requests from vLLM's metadata of a step.

    A request's key is the number of its first block.
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

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RequestRows:
        """Return the rows of one step."""
        given = common_attn_metadata
        first = given.block_table_tensor[: given.num_reqs, 0]
        start = given.query_start_loc_cpu[: given.num_reqs + 1]
        return RequestRows(tuple(first.tolist()), tuple(start.tolist()))
