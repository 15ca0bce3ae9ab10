"""Attention metadata of a step, for tokens stored in vLLM's slots."""

from typing import Final, cast

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from kv_runtime import Blocks, DecodeBuffers, SlotLayer, SlotStep, captures, split_requests
from kv_serve.vllm.shape import attention_layers

# Devices whose launches vLLM captures.
CAPTURING: Final = frozenset({"cuda"})


class SlotBuilder(AttentionMetadataBuilder[SlotStep]):
    """Builds the slots and sequence lengths of a step, once for all layers.

    Once vLLM captures CUDA graphs of decode steps, the metadata of every decode step is in the
    memory that they read.

    Under speculative decoding a decoding request has several new tokens. Each is then a row of its
    own, so that it attends as a token that is decoded alone, and what is accepted does not depend
    on drafts.
    """

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Compute how blocks are divided into pages; those of a draft model have its own sizes."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        named = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.blocks = _blocks(named.impl.layer, kv_cache_spec, device)
        self.buffers: DecodeBuffers | None = None  # until a graph is captured
        # The most tokens of a request that are verified in a step; None: there are no drafts. A
        # preempted request that reads its output again has more.
        given = vllm_config.speculative_config
        self.verified = None if given is None else given.num_speculative_tokens + 1

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Return that decode steps can be captured, if kernels for GPUs compute all of them.

        Steps that verify drafts are not: the number of a request's rows differs between them.
        """
        device = torch.device(vllm_config.device_config.device_type)
        if device.type not in CAPTURING or vllm_config.speculative_config is not None:
            return AttentionCGSupport.NEVER
        spec = cast(AttentionSpec, kv_cache_spec)
        dtype = vllm_config.model_config.dtype
        queries = {layer.num_heads // layer.num_kv_heads for layer in attention_layers(vllm_config)}
        able = all(
            captures(layer, blocks, count * blocks.heads, dtype, device)
            for layer in _layers(vllm_config)
            for blocks in [_blocks(layer, spec, device)]
            for count in queries
        )
        if not able:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SlotStep:
        """Return the metadata of one step."""
        return self._step(common_attn_metadata, split=self.verified is not None)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> SlotStep:
        """Return the metadata of a step of the draft model, which vLLM checks anyway.

        It reads what was accepted as a prompt, and vLLM does not say which requests are in theirs.
        """
        return self._step(common_attn_metadata, split=False)

    def _step(self, given: CommonAttentionMetadata, *, split: bool) -> SlotStep:
        start = given.query_start_loc_cpu[: given.num_reqs + 1]
        length = given.seq_lens[: given.num_reqs]
        table = given.block_table_tensor[: given.num_reqs]
        slot = given.slot_mapping[: given.num_actual_tokens]
        if split and given.max_query_len > 1:
            assert self.verified is not None, "there are drafts"
            assert given.is_prefilling is not None, "vLLM's model runners set it"
            verify = ~given.is_prefilling[: given.num_reqs] & (start.diff() <= self.verified)
            start, length, table = split_requests(start, length, table, verify)
        count = None if self.buffers is None else _decoding(start)
        if self.buffers is None or count is None or given.num_reqs > self.buffers.requests:
            return self.blocks.step(start, length, given.max_seq_len, table, slot)
        return self.buffers.step(count, length, given.max_seq_len, table, slot)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> SlotStep:
        """Return the metadata of a decode step that is captured.

        The memory for it is allocated at the first call, which vLLM's profiling of the memory for
        graphs counts.
        """
        given = common_attn_metadata
        if self.buffers is None:
            config = self.vllm_config
            most = config.scheduler_config.max_num_seqs
            captured = config.compilation_config.max_cudagraph_capture_size
            requests = max(given.num_reqs, most if captured is None else min(most, captured))
            longest = config.model_config.max_model_len
            self.buffers = DecodeBuffers.of(self.blocks, requests, longest, self.device)
        start = given.query_start_loc_cpu[: given.num_reqs + 1]
        if _decoding(start) is None or given.num_reqs > self.buffers.requests:
            raise RuntimeError(
                f"vLLM captures a CUDA graph of {given.num_reqs} requests with up to "
                f"{given.max_query_len} new tokens each; supported are up to "
                f"{self.buffers.requests} requests with one: please report this with vLLM's version"
            )
        return self.build(0, given)


def _decoding(start: torch.Tensor) -> int | None:
    """Count the requests with one new token, if all others follow and have none; else None."""
    count = int(start[-1])
    alone = torch.equal(start[: count + 1], torch.arange(count + 1, dtype=start.dtype))
    return count if alone else None


def _layers(config: VllmConfig) -> list[SlotLayer]:
    layers = [layer.impl.layer for layer in attention_layers(config)]
    assert all(isinstance(layer, SlotLayer) for layer in layers), "VllmSlots has SlotLayer layers"
    return layers


def _blocks(layer: SlotLayer, spec: AttentionSpec, device: torch.device) -> Blocks:
    size = spec.num_kv_heads, spec.block_size, spec.page_size_bytes
    return Blocks.of(layer.format, *size, device, layer.backend)
