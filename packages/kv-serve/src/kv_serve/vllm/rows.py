"""Where the tokens of each request stand in a step's tensors."""

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """One step, for all layers."""

    first: tuple[int, ...]  # the number of the first block of each request, which names it
    start: tuple[int, ...]  # its first token among those of the step, and then their number


class RowsBuilder(AttentionMetadataBuilder[Rows]):
    """Reads them off vLLM's description of a step."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Nothing is to be known beforehand; vLLM gives the arguments."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Rows:
        """Describe one step."""
        given = common_attn_metadata
        first = given.block_table_tensor[: given.num_reqs, 0]
        start = given.query_start_loc_cpu[: given.num_reqs + 1]
        return Rows(tuple(first.tolist()), tuple(start.tolist()))
