"""The metadata of steps over slots, before and after CUDA graphs are captured."""

from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import pytest
import torch

from kv_policy import CacheShape, parse, tier_formats
from kv_runtime import Blocks, DecodeBuffers, SlotLayer

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kv_serve.vllm.slots import SlotBuilder

CPU, LONGEST, MOST, HEADS, SIZE = torch.device("cpu"), 20, 4, 2, 4
SHAPE = CacheShape(1, HEADS, 2, 8, 8, torch.float32)
(FORMAT,) = tier_formats(parse("k8v4"), SHAPE)


@pytest.fixture
def builder() -> "SlotBuilder":
    from kv_serve.vllm.slots import SlotBuilder

    made = SlotBuilder.__new__(SlotBuilder)
    made.blocks = Blocks.of(FORMAT, HEADS, SIZE, HEADS * SIZE * FORMAT.nbytes, CPU, "torch")
    made.buffers, made.device, made.verified = None, CPU, None
    made.vllm_config = MagicMock()
    made.vllm_config.scheduler_config.max_num_seqs = 2 * MOST
    made.vllm_config.compilation_config.max_cudagraph_capture_size = MOST
    made.vllm_config.model_config.max_model_len = LONGEST
    return made


def metadata(new: list[int]) -> "CommonAttentionMetadata":
    """Return vLLM's metadata of requests with so many new tokens, some of which may be padding."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    start = torch.tensor([0, *new]).cumsum(0)
    count = max(sum(new), len(new))
    return CommonAttentionMetadata(
        start,
        start,
        torch.tensor(new).int() + 7,
        num_reqs=len(new),
        num_actual_tokens=count,
        max_query_len=max(new),
        max_seq_len=7 + max(new),
        block_table_tensor=torch.arange(1, 1 + 5 * len(new)).int().view(len(new), 5),
        slot_mapping=torch.arange(count),
    )


def test_metadata_is_in_new_memory_until_a_graph_is_captured(builder: "SlotBuilder") -> None:
    first, second = (builder.build(0, metadata([1, 1])) for _ in range(2))
    assert first.batches[0].table.data_ptr() != second.batches[0].table.data_ptr()


def test_then_metadata_of_decode_steps_is_where_the_graph_reads_it(builder: "SlotBuilder") -> None:
    captured = builder.build_for_cudagraph_capture(metadata([1, 1, 1]))
    assert isinstance(builder.buffers, DecodeBuffers)
    assert builder.buffers.requests == MOST
    for new in ([1, 1, 1], [1, 1, 0]):
        step = builder.build(0, metadata(new))
        (own,), (batch,) = captured.batches, step.batches
        for name in ("table", "stored", "position"):
            held, now = getattr(own, name), getattr(batch, name)
            assert (held.data_ptr(), held.shape) == (now.data_ptr(), now.shape)
        assert captured.page.data_ptr() == step.page.data_ptr()
        assert captured.slot.data_ptr() == step.slot.data_ptr()
        assert (own.longest, batch.longest) == (LONGEST, LONGEST)
        assert batch.position.flatten().tolist() == [7 if each else -1 for each in new]
        assert step.batches[0].tiles is not captured.batches[0].tiles  # it has a plan of its own


@pytest.mark.parametrize("new", [[3, 1, 1], [1, 3], [1] * (MOST + 1), [1, 0, 1]], ids=str)
def test_other_steps_are_not(builder: "SlotBuilder", new: list[int]) -> None:
    builder.build_for_cudagraph_capture(metadata([1]))
    assert builder.buffers is not None
    before = builder.buffers.position.clone()
    step = builder.build(0, metadata(new))
    assert torch.equal(builder.buffers.position, before)
    assert sum(int((batch.position >= 0).sum()) for batch in step.batches) == sum(new)


@pytest.mark.parametrize("new", [[2, 1], [1] * (MOST + 1)], ids=str)
def test_a_capture_of_other_steps_raises(builder: "SlotBuilder", new: list[int]) -> None:
    builder.build_for_cudagraph_capture(metadata([1]))
    with pytest.raises(RuntimeError, match="vLLM captures a CUDA graph"):
        builder.build_for_cudagraph_capture(metadata(new))


def test_drafts_are_rows_of_their_own_and_chunks_of_prompts_are_not(
    builder: "SlotBuilder",
) -> None:
    builder.verified = 4
    given = metadata([3, 1, 3, 6])
    given.is_prefilling = torch.tensor([False, False, True, False])  # the last reads output again
    step = builder.build(0, given)
    rows = [tuple(batch.position.shape) for batch in step.batches]
    assert rows == [(4, 1), (1, 3), (1, 6)]
    alone = step.batches[0]
    assert alone.position.flatten().tolist() == [7, 8, 9, 7]
    assert alone.stored[:, 0].tolist() == [7, 8, 9, 7]
    assert torch.equal(alone.table[0], alone.table[2])
    # A step of one token per request is as without speculative decoding.
    assert len(builder.build(0, metadata([1, 1])).batches) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_graph_is_captured_where_torch_attends(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on a CPU, whatever attends."""
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kv_serve.vllm import slots

    layer = SimpleNamespace(num_heads=4, num_kv_heads=HEADS)
    layer.impl = SimpleNamespace(layer=SlotLayer(FORMAT, 0.3, "torch"))
    monkeypatch.setattr(slots, "attention_layers", lambda config: [layer])
    monkeypatch.setattr(slots, "CAPTURING", frozenset({"cuda", "meta"}))
    config = MagicMock(spec=VllmConfig, speculative_config=None)
    config.device_config = SimpleNamespace(device_type="meta" if device == "cuda" else device)
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    spec = FullAttentionSpec(
        block_size=SIZE,
        num_kv_heads=HEADS,
        head_size=8,
        head_size_v=8,
        dtype=torch.uint8,
        state_content_bytes=FORMAT.nbytes,
    )
    found = slots.SlotBuilder.get_cudagraph_support(config, spec)
    assert found == AttentionCGSupport.NEVER
    # Nor of steps that verify drafts, whatever attends.
    monkeypatch.setattr(slots, "captures", lambda *given: True)
    found = slots.SlotBuilder.get_cudagraph_support(config, spec)
    able = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert found == (able if device == "cuda" else AttentionCGSupport.NEVER)
    config.speculative_config = MagicMock()
    found = slots.SlotBuilder.get_cudagraph_support(config, spec)
    assert found == AttentionCGSupport.NEVER
