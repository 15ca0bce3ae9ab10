"""Heads of different ranks that share a pool, compared with lists of tokens."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_paging import PagePool, PerHeadRankTiers, PoolExhausted
from kv_paging.rank_groups import RankGroups
from kv_policy import PageLayout, RawCodec, RunningMean, TokenFormat

Worlds: TypeAlias = Callable[..., Any]  # the class World of conftest.py
HEADS = [[0, 1, 0], [2, 2, 2], [1, 0, 2]]


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", ["one tier", "three tiers", "blocks above", "blocks in both"])
def test_random_programs(kind: str, tokens: int, new_world: Worlds) -> None:
    world = new_world(kind, seed=tokens, tokens=tokens, shape=(3, 2, 3), heads=HEADS)
    world.program(prompts=3, operations=16)


@pytest.mark.parametrize(
    ("kind", "capacity"), [("two tiers", 8), ("three tiers", 9), ("blocks above", 9)]
)
def test_a_fixed_pool_that_runs_dry_changes_nothing(
    kind: str, capacity: int, new_world: Worlds
) -> None:
    world = new_world(kind, shape=(1, 2, 2), capacity=capacity, heads=[[0, 1]])
    dry = 0
    for turn in range(30):
        before = (world.pool.data.clone(), [s.length.clone() for s in world.tiers.stores])
        held = [[list(x) for x in tier] for tier in world.held]
        try:
            world.step() if turn % 7 else world.prompt()
        except PoolExhausted:
            dry += 1
            lengths = zip(before[1], world.tiers.stores, strict=True)
            if turn % 7:
                assert torch.equal(before[0], world.pool.data)
                assert all(torch.equal(a, b.length) for a, b in lengths)
                world.held = held
            world.clear(torch.tensor([0, 1]))
            world.held = [[[] for _ in tier] for tier in world.held]
        world.check()
    assert dry


def test_pages_hold_what_a_kind_takes_and_no_more(new_world: Worlds) -> None:
    """Pages of equal size: they hold more tokens of shorter vectors, without padding."""
    world = new_world("four tiers", shape=(3, 2, 3), tokens=4, heads=HEADS)
    tokens = [store.layout.tokens for store in world.tiers.stores[0].members]
    # With a score and a position 40, 28 and 28 bytes per token, in pages of 240.
    assert tokens == [6, 8, 8]
    assert [m.layout.format.key.dim for m in world.tiers.stores[0].members] == [4, 2, 4]
    assert len(world.tiers.parts) == 3 * 4


def test_views_are_those_of_the_heads_of_a_kind(new_world: Worlds) -> None:
    world = new_world("two tiers", shape=(3, 2, 3), heads=HEADS)
    world.prompt()
    store = world.tiers.stores[0]
    view = store.view_kind(0, 0)
    assert view.table.shape[:2] == view.length.shape == (2, 2)
    assert torch.equal(view.length, store.length[0][:, [0, 2]])
    assert store.view_kind(0, 1) is None  # that layer has no head of the kind


def test_means_need_a_row_for_each_table_row(new_world: Worlds) -> None:
    world = new_world("two tiers", shape=(3, 2, 3), heads=HEADS)
    world.prompt()
    store = world.tiers.stores[0]
    mass = torch.zeros(7, store.longest)  # one row more than table rows
    before, seen = torch.zeros(7, dtype=torch.long), mass.long()
    with pytest.raises(ValueError, match="before"):
        store.accumulate_layers(slice(0, 1), before, mass, seen, RunningMean())


def test_kinds_keep_table_rows_apart() -> None:
    kinds = RankGroups(torch.tensor([[0, 1], [1, 1]]), sequences=2)
    assert kinds.cells == (1, 3)
    assert kinds.rows(0).tolist() == [0, 2]  # layer 0, head 0, sequences 0 and 1
    assert kinds.rows(1).tolist() == [1, 3, 4, 6, 5, 7]
    where = kinds.split(torch.tensor([7, 0, 4]))
    assert [(p.tolist(), own.tolist()) for p, own in where] == [([1], [0]), ([0, 2], [5, 2])]
    assert (kinds.span(1, 0), kinds.span(1, 1)) == (slice(0, 1), slice(1, 3))
    with pytest.raises(ValueError, match="no head is of kind 0"):
        RankGroups(torch.tensor([[1, 1]]), sequences=1)


def test_kinds_of_different_tiers_are_refused() -> None:
    form = TokenFormat(RawCodec(2, torch.float32), RawCodec(2, torch.float32))
    layout = PageLayout.sized(form, 2)
    with pytest.raises(ValueError, match=r"layouts of \[1, 2\] tiers are given for 2 kinds"):
        PerHeadRankTiers(
            PagePool(layout.nbytes), [[layout], [layout] * 2], torch.tensor([[0, 1]]), 1
        )


@settings(deadline=None, max_examples=30)
@given(
    kind=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), min_size=1, max_size=4),
    sequences=st.lists(st.integers(0, 3), min_size=2, max_size=4),
)
def test_what_rows_have_is_cut_by_kind(kind, sequences):
    """Also after sequences came and went."""
    order = sorted({k for layer in kind for k in layer})
    groups = RankGroups(torch.tensor([[order.index(k) for k in layer] for layer in kind]), 1)
    for count in sequences:
        groups.sequences = count
        x = torch.randn(3, groups.kind.numel() * count)
        for dim, y in ((1, x), (0, x.T)):
            found = groups.cut(y, dim)
            assert len(found) == groups.count
            for i, part in enumerate(found):
                assert torch.equal(part, y.index_select(dim, groups.rows(i)))
