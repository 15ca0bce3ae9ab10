"""Attention metadata of a step, for tokens stored in vLLM's slots."""

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from kv_runtime import Blocks, SlotLayer, SlotStep
from kv_serve.vllm.shape import attention_layers


class SlotBuilder(AttentionMetadataBuilder[SlotStep]):
    """Builds the slots and sequence lengths of a step, once for all layers."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Compute how blocks are divided into pages."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = attention_layers(vllm_config)[0].impl.layer
        assert isinstance(layer, SlotLayer), "VllmSlots storage has SlotLayer layers"
        spec = kv_cache_spec
        size = spec.num_kv_heads, spec.block_size, spec.page_size_bytes
        self.blocks = Blocks.of(layer.format, *size, device, layer.backend)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SlotStep:
        """Return the metadata of one step."""
        given = common_attn_metadata
        return self.blocks.step(
            given.query_start_loc_cpu[: given.num_reqs + 1],
            given.seq_lens[: given.num_reqs],
            given.max_seq_len,
            given.block_table_tensor[: given.num_reqs],
            given.slot_mapping[: given.num_actual_tokens],
        )
