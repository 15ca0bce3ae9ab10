"""Which blocks of layers that vLLM keeps a prefix has: those that later tokens attend to."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from kv_serve.vllm.other_layers import OtherLayers

BLOCKS, LONGEST = 100, 512


def layers(spec: Any) -> "tuple[OtherLayers, Any, BlockPool]":
    """Return the only layer of a pool, vLLM's manager of it, and the pool."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kv_serve.vllm.other_layers import OtherLayers

    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    pool = BlockPool(BLOCKS, False, spec.block_size)
    manager = get_manager_for_kv_cache_spec(
        spec,
        LONGEST,
        LONGEST,
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=spec.block_size,
    )
    return OtherLayers([manager], pool, 1000), manager, pool


def attention(size: int, **of: int) -> Any:
    """Return a spec of keys and values that have a window or chunks; without either, of drafts."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

    from kv_serve.vllm.drafters import DraftSpec

    kind = SlidingWindowSpec if "sliding_window" in of else ChunkedLocalAttentionSpec
    kind = kind if of else DraftSpec
    more = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return kind(block_size=size, **more, **of)


@given(
    size=st.integers(1, 9),
    span=st.integers(2, 40),
    kind=st.sampled_from(("sliding_window", "attention_chunk_size", "drafts")),
    tokens=st.integers(1, 200),
    chunk=st.integers(1, 60),
)
def test_a_prefix_has_the_blocks_of_the_tokens_that_the_next_one_attends_to(
    size: int, span: int, kind: str, tokens: int, chunk: int
) -> None:
    of = {} if kind == "drafts" else {kind: span}
    mine, manager, pool = layers(attention(size, **of))
    free = pool.get_num_free_blocks()
    for begin in range(0, tokens, chunk):  # as vLLM allocates for the chunks of a prompt
        manager.remove_skipped_blocks("a", begin)
        end = min(begin + chunk, tokens)
        more = -(-end // size) - len(manager.req_to_blocks["a"])
        if more > pool.get_num_free_blocks():
            return
        manager.allocate_new_blocks("a", end, end)
    chunks = kind == "attention_chunk_size"
    first = tokens // span * span if chunks else max(0, tokens - span + 1)
    first = 0 if kind == "drafts" else first
    begun = {tokens // size} if tokens % size else set()  # a block that later tokens fill
    columns = sorted(begun | {each // size for each in range(first, tokens)})
    assert mine.count(tokens) == len(columns)
    held = [manager.req_to_blocks["a"][each].block_id for each in columns]

    if pool.get_num_free_blocks() < mine.copied(tokens):
        return
    stored = mine.store("a", tokens)
    full = [each for each in columns if (each + 1) * size <= tokens]
    assert [each.block_id for each in stored][: len(full)] == held[: len(full)]
    copies = mine.copies()
    assert (copies.before, len(copies.after)) == ((), len(columns) - len(full))
    assert (
        len(copies.after)
        == mine.copied(tokens)
        == len({each.block_id for each in stored} - {*held})
    )
    assert copies.after == tuple(zip(held[len(full) :], ids(stored[len(full) :]), strict=True))
    turn = mine.share("a", tokens)
    assert ids(turn) == held
    manager.free("a")
    assert pool.get_num_free_blocks() == free - len({*ids(stored), *ids(turn)})
    pool.free_blocks(stored)
    pool.free_blocks(turn)
    assert pool.get_num_free_blocks() == free

    manager.add_local_computed_blocks("b", [], 0, tokens)
    manager.allocate_external_computed_blocks("b", 0, tokens)
    manager.allocate_new_blocks("b", tokens + 1, tokens + 1)
    mine.load(turn, "b", tokens)
    targets = [manager.req_to_blocks["b"][each].block_id for each in columns]
    assert mine.copies() == (tuple(zip(held, targets, strict=True)), ())
    assert mine.copies() == ((), ())


def ids(blocks: Collection[Any]) -> list[int]:
    return [each.block_id for each in blocks]


@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_a_state_is_copied_as_the_next_token_changes_it(tokens: int) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=LONGEST, shapes=((3,),), dtypes=(torch.float32,))
    mine, manager, _ = layers(spec)
    (state,) = manager.allocate_new_blocks("a", tokens, tokens)
    assert mine.count(tokens) == mine.copied(tokens) == 1
    (stored,) = mine.store("a", tokens)
    assert mine.copies().after == ((state.block_id, stored.block_id),)
    assert mine.share("a", tokens) == [state]


def test_kinds_without_a_known_end_are_strangers() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.float32)
    assert layers(spec)[0].stranger == "FullAttentionSpec"
    assert layers(attention(8, sliding_window=9))[0].stranger is None
    assert layers(attention(8))[0].stranger is None
    assert layers(attention(8))[0].keeps_all
    assert not layers(attention(8, sliding_window=9))[0].keeps_all
