"""The rows of a store are those of any other page size and pool."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_paging import PagePool, PoolExhausted, SavedRows, Tiers, fit, restore_rows, saved_rows
from kv_policy import RawCodec, TokenFormat

FORMATS = [TokenFormat(RawCodec(4, kind), RawCodec(3, kind)) for kind in (torch.float32,) * 2]
SHAPE = (2, 3, 2)  # layers, sequences, heads
ROWS = 12


def tiers(page_tokens: int, *, pages: int | None = None) -> Tiers:
    layouts = fit(FORMATS, page_tokens, scores=True, positions=True)
    pool = PagePool(layouts[0].nbytes, pages or 0, grows=pages is None, poison=True)
    return Tiers(pool, layouts, *SHAPE)


def filled(page_tokens: int, counts: list[int], seed: int = 1) -> Tiers:
    """Two tiers over one table, with tokens removed from the first."""
    made, generator = tiers(page_tokens), torch.Generator().manual_seed(seed)
    rows, width = torch.arange(ROWS), max(1, *counts)
    for tier in range(2):
        keep = torch.arange(width) < torch.tensor(counts).roll(tier)[:, None]
        key = torch.randn(ROWS, width, 4, generator=generator)
        value = torch.randn(ROWS, width, 3, generator=generator)
        score = torch.rand(ROWS, width, generator=generator)
        place = torch.arange(width).expand(ROWS, -1)
        made.append(tier, rows, key, value, keep, score, place)
    first = made.stores[0]
    first.compact(rows, torch.rand(ROWS, width, generator=generator) < 0.7)
    return made


def same(mine: SavedRows, other: SavedRows) -> bool:
    pairs = zip(
        (mine.length, *mine.parts, mine.score, mine.position),
        (other.length, *other.parts, other.score, other.position),
        strict=True,
    )
    return all(torch.equal(a, b) for a, b in pairs)


@given(
    counts=st.lists(st.integers(0, 19), min_size=ROWS, max_size=ROWS),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
@settings(max_examples=20)
def test_rows_are_restored_with_any_page_size(counts: list[int], sizes: tuple[int, int]) -> None:
    made, other = filled(sizes[0], counts), tiers(sizes[1])
    saved = [saved_rows(store) for store in made.stores]
    for store, rows in zip(other.stores, saved, strict=True):
        restore_rows(store, rows)
    other.pool.check(torch.cat([store.pages() for store in other.stores]))
    for store, rows, first in zip(other.stores, saved, made.stores, strict=True):
        assert same(saved_rows(store), rows)
        assert torch.equal(rows.live, first.live.cpu())
        assert store.longest == first.longest == int(rows.length.max())


def test_rows_of_other_sizes_are_refused_and_a_small_pool_is_exhausted() -> None:
    saved = saved_rows(filled(4, [9] * ROWS).stores[0])
    with pytest.raises(ValueError, match="length should be"):
        restore_rows(Tiers(*_one()).stores[0], saved)
    small = tiers(4, pages=3)
    with pytest.raises(PoolExhausted):
        restore_rows(small.stores[0], saved)
    assert small.pool.free == 3
    made = filled(4, [2] * ROWS)
    with pytest.raises(ValueError, match="fill empty ones"):
        restore_rows(made.stores[1], saved)


def _one() -> tuple[object, ...]:
    layouts = fit(FORMATS, 4, scores=True, positions=True)
    return PagePool(layouts[0].nbytes), layouts, 1, 1, 1
