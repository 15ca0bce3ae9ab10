"""All tiers of a cache over one pool, compared with lists of tokens."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_paging import PoolExhausted, Tiers
from kv_paging.table import columns_for, pages_for

Worlds: TypeAlias = Callable[..., Any]  # the class World of conftest.py


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    "kind",
    [
        "one tier",
        "two tiers",
        "three tiers",
        "four tiers",
        "blocks above",
        "blocks below",
        "blocks in both",
        "values in keys",
    ],
)
def test_random_programs(kind: str, tokens: int, new_world: Worlds) -> None:
    world = new_world(kind, seed=tokens, tokens=tokens)
    world.program(prompts=8, operations=25)


@pytest.mark.parametrize(
    ("kind", "capacity"), [("two tiers", 12), ("three tiers", 16), ("blocks above", 9)]
)
def test_a_fixed_pool_that_runs_dry_changes_nothing(
    kind: str, capacity: int, new_world: Worlds
) -> None:
    world = new_world(kind, shape=(1, 2, 2), capacity=capacity)
    dry = 0
    for _ in range(60):
        before = (world.pool.data.clone(), [s.length.clone() for s in world.tiers.stores])
        held = [[list(x) for x in tier] for tier in world.held]
        try:
            world.step()
        except PoolExhausted:
            dry += 1
            assert torch.equal(before[0], world.pool.data)
            lengths = zip(before[1], world.tiers.stores, strict=True)
            assert all(torch.equal(a, b.length) for a, b in lengths)
            world.held = held
            world.clear(torch.tensor([world.below(2)]))
        world.check()
    assert dry


@pytest.mark.parametrize("kind", ["two tiers", "three tiers"])
def test_a_step_with_one_tier_given_takes_one_page_a_table_row_at_most(
    kind: str, new_world: Worlds
) -> None:
    world = new_world(kind, shape=(2, 3, 2))
    for _ in range(30):
        before = world.pool.used
        world.step()
        assert world.pool.used - before <= math.prod(world.shape) * len(world.formats)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 40), st.integers(1, 40))
def test_a_table_from_both_sides_never_overflows(high: int, low: int, t: int, u: int) -> None:
    """LeanKV section 5.2 has ceil(N / t), one too few if both last pages are partial."""
    columns = columns_for(high + low, min(t, u))
    assert pages_for(high, t) + pages_for(low, u) <= columns
    assert columns <= -(-(high + low) // min(t, u)) + 1


def test_a_long_generation_stays_within_its_table(new_world: Worlds) -> None:
    world = new_world("two tiers", shape=(1, 2, 2))
    for _ in range(150):
        world.step()
    world.check()
    high, low = world.tiers.stores
    most = int((high.length + low.length).amax())
    fewest = min(high.layout.tokens, low.layout.tokens)
    assert high.table.shape[-1] <= columns_for(most, fewest) + columns_for(2 * 64, fewest)


def test_tokens_wait_until_they_fill_a_block(new_world: Worlds) -> None:
    world = new_world("one tier of blocks", shape=(1, 1, 1))
    blocks, waiting = world.tiers.stores
    for count in range(1, 10):
        world.step_in(0)
        assert (int(blocks.length), int(waiting.length)) == (count // 4 * 4, count % 4)
        world.check()


def test_a_block_goes_when_its_last_token_has(new_world: Worlds) -> None:
    world = new_world("blocks below", shape=(1, 1, 1))
    for _ in range(8):
        world.step_in(1)
    blocks, _ = world.tiers.stores[1:]
    assert world.tiers.views(0)[0].holes
    sizes = []
    for _ in range(8):
        _, place = world.tiers.weakest()
        world.leave(1, place)
        world.check()
        sizes.append(int(blocks.length))
    assert sizes[-1] == 0
    assert set(sizes) <= {0, 4, 8}
    assert world.pool.used == 0


def test_the_weakest_of_some_tiers(new_world: Worlds) -> None:
    """Tiers after the first are as without a token."""
    world = new_world("two tiers", shape=(2, 1, 2))
    for tier in (0, 1, 1, 0):
        world.step_in(tier)
    every, places = world.tiers.weakest()
    for first in (0, 1, 2):
        score, place = world.tiers.weakest(first=first)
        assert torch.equal(score[:first], every[:first])
        assert torch.equal(place[:first], places[:first])
        assert (score[first:] == torch.inf).all()
        assert (place[first:] == -1).all()


@pytest.mark.parametrize("rescored", [False, True])
def test_a_hole_in_a_page_has_no_position_and_the_score_inf(
    rescored: bool, new_world: Worlds
) -> None:
    world = new_world("one tier of blocks", shape=(1, 1, 2))
    for _ in range(8):
        world.step_in(0)
    for _ in range(3):
        world.leave(0, world.tiers.weakest()[1])
    if rescored:
        world.rescore()  # which leaves holes unchanged
    blocks = world.tiers.stores[0]
    layout, pages = blocks.layout, world.pool.data[blocks.pages()]
    first, last = layout.score_offset, layout.position_offset
    score = pages[:, first : first + 4 * layout.tokens].contiguous().view(torch.float32)
    position = pages[:, last : last + 4 * layout.tokens].contiguous().view(torch.int32)
    holes = position == -1
    assert layout.tokens == 4  # every page is full
    assert int(holes.sum()) == int((blocks.length - blocks.live).sum()) > 0
    assert score[holes].isposinf().all()
    assert not score[~holes].isinf().any()
    world.check()


def test_a_prompt_of_blocks_that_does_not_fit_changes_nothing(new_world: Worlds) -> None:
    world = new_world("one tier of blocks", shape=(1, 1, 1), capacity=3)
    blocks, waiting = world.tiers.stores
    assert (blocks.layout.tokens, waiting.layout.tokens) == (4, 1)
    world.step_in(0)
    key, value, score, place = world.tokens(torch.tensor([0]), 6)
    keep = torch.ones(1, 6, dtype=torch.bool)
    before = world.pool.data.clone()
    with pytest.raises(PoolExhausted):  # a page for a block, three for the residual
        world.tiers.append(0, torch.tensor([0]), key, value, keep, score, place)
    assert torch.equal(world.pool.data, before)
    world.check()
    fewer = (x[:, :5] for x in (key, value, keep, score, place))
    world.tiers.append(0, torch.tensor([0]), *fewer)
    assert (world.pool.used, world.tiers.counts().tolist()) == (3, [[[[6]]]])


def test_trimming_keeps_what_is_held_and_a_page_for_each_table_row_and_store(
    new_world: Worlds,
) -> None:
    world = new_world("three tiers", shape=(2, 4, 2))
    for _ in range(12):
        world.prompt()
    world.clear(torch.tensor([0, 2, 3]))
    used, before, spare = world.pool.used, world.pool.capacity, 3 * math.prod(world.shape)
    assert before > used + spare
    world.tiers.trim()
    world.check()
    assert (world.pool.used, world.pool.capacity) == (used, used + spare)
    assert world.pool.least_free == spare
    assert len(world.pool.data) == used + spare
    world.tiers.trim()  # nothing more to free
    world.check()
    assert world.pool.capacity == used + spare
    world.step()  # the remaining pages suffice
    world.check()
    assert world.pool.capacity == used + spare


def test_a_shared_or_fixed_pool_is_not_trimmed(new_world: Worlds) -> None:
    shared = new_world("two tiers", shape=(1, 2, 2))
    shared.prompt()
    pages = shared.pool.allocate(1)
    data = shared.pool.data.clone()
    with pytest.raises(RuntimeError, match=f"page {int(pages[0])} occurs 0 times"):
        shared.tiers.trim()
    assert torch.equal(data, shared.pool.data)
    fixed = new_world("two tiers", shape=(1, 2, 2), capacity=50)
    with pytest.raises(ValueError, match="a pool that cannot grow cannot shrink"):
        fixed.tiers.trim()


def test_bad_tiers(new_world: Worlds) -> None:
    world = new_world("one tier of blocks", shape=(1, 1, 1))
    pool, layouts = world.pool, [world.tiers.stores[0].layout]
    with pytest.raises(ValueError, match="a tier encodes 4 tokens together; pass `raw`"):
        Tiers(pool, layouts, 1, 1, 1)
    with pytest.raises(ValueError, match="no tier is given"):
        Tiers(pool, [], 1, 1, 1)
