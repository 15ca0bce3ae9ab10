"""Bounds of keys after random operations, compared with the keys that are stored."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounded_world import CODED, IN_PAGES, LAYOUT, World
from kv_paging.bounding import bounds_in, bounds_of

OPERATIONS: tuple[Callable[[World], None], ...] = (
    World.append, World.grow, World.evict_one, World.compact, World.remove, World.replace,
    World.select, World.truncate, World.clear, World.trim, World.join, World.rewrite,
    World.branch,
)  # fmt: skip
LAYOUTS = pytest.mark.parametrize(
    ("layout", "coded"),
    [(LAYOUT, False), (IN_PAGES, False), (LAYOUT, True), (CODED, True)],
    ids=["beside", "inside", "codes-beside", "codes-inside"],
)


@LAYOUTS
@settings(max_examples=80)
@given(
    st.integers(0, 99),
    st.lists(st.sampled_from([*OPERATIONS, World.append, World.update, World.update]), max_size=12),
)
def test_bounds_are_of_the_stored_keys_after_any_operations(
    layout, coded, seed, operations
) -> None:
    world = World.of(seed, layout=layout, coded=coded)
    world.append()
    world.update()
    for operation in operations:
        operation(world)
        if world.tiers.stores[0].bounds.count.numel() == world.tiers.stores[0].length.numel():
            world.check()  # what is still known is right
    world.update()


@pytest.mark.parametrize("layout", [IN_PAGES, CODED], ids=["bounds", "codes"])
def test_sequences_bring_their_bounds_in_pages_with_them(layout) -> None:
    """Joined and branched, full pages are bounded once; a page is copied with its bounds."""
    world = World.of(4, layout=layout)
    world.append(30)
    world.update()
    store = world.tiers.stores[0]
    first = store.bounds.count.view(store.length.shape)[:, 0].clone()
    assert first.sum() > 0
    world.branch()
    world.check()
    found = store.bounds.count.view(store.length.shape)
    assert torch.equal(found[:, 2], first)
    world.tiers.select(torch.tensor([2, 2, 0]))
    world.check()
    assert torch.equal(store.bounds.count.view(store.length.shape)[:, 1], first)
    world.join()
    found = store.bounds.count.view(store.length.shape)
    assert torch.equal(found[:, 0], first)
    assert found[:, 3].sum() == 0
    world.update()


def test_pages_that_are_not_aligned_have_no_bounds() -> None:
    with pytest.raises(ValueError, match="no bounds; use a layout with bounds=True"):
        bounds_in(torch.zeros(2, LAYOUT.nbytes, dtype=torch.uint8), LAYOUT)
    wide = torch.zeros(2, IN_PAGES.nbytes + 8, dtype=torch.uint8)
    for data in (wide[:, : IN_PAGES.nbytes], wide.view(-1)[8 : 8 + IN_PAGES.nbytes][None]):
        with pytest.raises(ValueError, match="both must be multiples of 16"):
            bounds_in(data, IN_PAGES)


@pytest.mark.parametrize("layout", [IN_PAGES, CODED], ids=["bounds", "codes"])
def test_pages_have_what_is_asked_for(layout) -> None:
    with pytest.raises(ValueError, match=r"of their keys, and coded=.*; use a layout with coded="):
        World.of(1, layout=layout, coded=not layout.coded)


def test_appending_drops_no_bound() -> None:
    world = World.of(1)
    world.append(20)
    world.update()
    store = world.tiers.stores[0]
    before = store.bounds.count.clone()
    world.append(20)
    for _ in range(5):
        rows = torch.randn(len(store.table_rows()), 4)
        some = torch.ones(len(rows), dtype=torch.bool)
        world.tiers.grow(some, rows, rows[:, :2], rows[:, 0], some.long())
    assert torch.equal(store.bounds.count, before)
    world.tiers.truncate(torch.tensor([100, 100]))
    assert torch.equal(store.bounds.count, before)
    world.update()


def test_an_eviction_drops_bounds_of_its_rows_alone() -> None:
    world = World.of(2)
    world.append(30)
    world.update()
    store = world.tiers.stores[0]
    before = store.bounds.count.clone()
    keep = torch.ones(1, store.longest, dtype=torch.bool)
    keep[0, 3] = False
    store.compact(torch.tensor([3]), keep)
    assert store.bounds.count[3] == 0
    before[3] = 0
    assert torch.equal(store.bounds.count, before)


@pytest.mark.parametrize("x", [1.0, -1.0, 1 + 2**-9, -1 - 2**-9, 3e38, -3e38, 0.0])
def test_bounds_are_rounded_outwards(x: float) -> None:
    key = torch.full((1, 2, 1), x)
    high, low = bounds_of(key, torch.ones(1, 2, dtype=torch.bool))[0].float().tolist()
    assert low <= x <= high
    assert abs(high - x) <= abs(x) / 128


def test_empty_slots_have_no_part_in_bounds() -> None:
    key = torch.tensor([[[1.0], [torch.nan], [3.0]]])
    held = torch.tensor([[True, False, True]])
    assert bounds_of(key, held).tolist() == [[3.0, 1.0]]
    high, low = bounds_of(key, torch.zeros_like(held))[0].tolist()
    assert high < -1e38
    assert low > 1e38


def test_bytes_are_those_of_the_tensors() -> None:
    world = World.of(3)
    world.append(30)
    world.update()
    bounds = world.tiers.stores[0].bounds
    rows, width = world.tiers.stores[0].length.numel(), bounds.both.shape[1]
    assert bounds.nbytes == rows * (width * 2 * 4 * 2 + 8)
    world = World.of(3, layout=IN_PAGES)
    world.append(30)
    world.update()
    assert world.tiers.stores[0].bounds.nbytes == rows * 8  # the others are in pages
    world = World.of(3, coded=True)
    world.append(30)
    world.update()
    bounds = world.tiers.stores[0].bounds
    assert bounds.nbytes == rows * (bounds.both.shape[1] * 4 * (4 + 2) + 8)
