"""Sequences that hold the same pages: counted once, copied when one of them writes."""

import pytest
import torch

from kv_paging import PagePool, PoolExhausted, Tiers, fit
from kv_policy import RawCodec, TokenFormat

LAYERS, HEADS, DIM, TOKENS = 2, 3, 4, 8
FORM = TokenFormat(RawCodec(DIM, torch.float32), RawCodec(DIM, torch.float32))


def document(length: int, *, pages: int | None = None) -> Tiers:
    """Return tiers of one sequence with `length` tokens in each head, scored and placed."""
    (layout,) = fit([FORM], TOKENS, scores=True, positions=True)
    pool = PagePool(layout.nbytes, pages or 0, grows=pages is None, poison=True)
    tiers = Tiers(pool, [layout], LAYERS, 1, HEADS)
    rows = tiers.table_rows()
    tiers.append(0, rows, *tokens(len(rows), length), *beside(len(rows), length))
    return tiers


def tokens(rows: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(sum(lead))
    key, value = torch.randn(2, rows, *lead, DIM, generator=draw)
    return key, value, torch.ones(rows, *lead, dtype=torch.bool)


def beside(rows: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(rows * sum(lead)).view(rows, *lead)
    return place.float(), place


@pytest.mark.parametrize(("length", "own"), [(40, 0), (43, 1)])
def test_a_document_is_held_once(length: int, own: int) -> None:
    tiers, every = document(length), LAYERS * HEADS
    one = tiers.pages_used
    tiers.select(torch.zeros(16, dtype=torch.long), share=True)
    assert tiers.pages_used == tiers.pool.used == one + 15 * own * every  # the last, partial page
    rows = every * 16
    some = torch.ones(rows, dtype=torch.bool)
    key, value, _ = tokens(rows)
    tiers.grow(some, key, value, torch.zeros(rows), torch.zeros(rows, dtype=torch.long))
    tiers.check()
    assert tiers.pages_used == one - own * every + 16 * every  # each appends to a page of its own
    tiers.select(torch.tensor([3]))
    tiers.check()
    assert not tiers.pool.used - tiers.pages_used
    assert tiers.pages_used == one + (1 - own) * every


def test_a_token_is_evicted_from_one_sequence_alone() -> None:
    tiers = document(40)
    (store,) = tiers.stores
    before = store.read(store.table_rows(), frozenset({"keys"})).key
    tiers.select(torch.tensor([0, 0]), share=True)
    rows = store.table_rows().view(LAYERS, 2, HEADS)[:, 1].flatten()
    store.compact(rows, torch.arange(40).expand(len(rows), 40) % 3 == 0)
    tiers.check()
    kept = store.table_rows().view(LAYERS, 2, HEADS)[:, 0].flatten()
    after = store.read(kept, frozenset({"keys"})).key
    assert before is not None
    assert after is not None
    assert torch.equal(after, before)
    assert not tiers.pool.shares


def test_without_pages_for_copies_nothing_changes() -> None:
    pages = LAYERS * HEADS * 5
    tiers = document(40, pages=pages)
    tiers.select(torch.tensor([0, 0]), share=True)
    (store,) = tiers.stores
    rows = store.table_rows()
    with pytest.raises(PoolExhausted, match="30 pages are needed and 0 are free"):
        store.set_scores(rows, torch.zeros(len(rows), 40))
    tiers.check()
    assert tiers.pages_used == pages
    tiers.clear(torch.tensor([1]))
    store.set_scores(rows, torch.zeros(len(rows), 40))
    assert tiers.pages_used == pages


def test_a_pool_shrinks_around_shared_pages() -> None:
    tiers = document(24)
    rows = tiers.table_rows()
    tiers.select(torch.tensor([0, 0, 0]), share=True)
    (store,) = tiers.stores
    before = store.read(store.table_rows(), frozenset({"values"})).value
    tiers.pool.reserve(100)
    tiers.trim()
    tiers.check()
    assert tiers.pool.capacity < 100
    after = store.read(store.table_rows(), frozenset({"values"})).value
    assert before is not None
    assert after is not None
    assert torch.equal(after, before)
    tiers.clear(torch.arange(3))
    assert tiers.pool.used == 0
    assert len(rows) == LAYERS * HEADS


def test_pages_listed_as_held_too_often_are_found() -> None:
    tiers = document(24)
    tiers.select(torch.tensor([0, 0]), share=True)
    held = tiers.pages()
    with pytest.raises(RuntimeError, match=r"is listed 1 times as held, and 2 rows hold it"):
        tiers.pool.check(held.unique())
    with pytest.raises(RuntimeError, match=r"is listed 3 times as held, and 2 rows hold it"):
        tiers.pool.check(torch.cat((held, held[:1])))


def test_sequences_that_lose_nothing_go_on_sharing() -> None:
    tiers = document(40)
    one = tiers.pages_used
    tiers.select(torch.tensor([0, 0, 0]), share=True)
    (store,) = tiers.stores
    rows = store.table_rows()
    store.compact(rows, torch.ones(len(rows), 40, dtype=torch.bool))
    assert tiers.pages_used == one
    last = store.table_rows().view(LAYERS, 3, HEADS)[:, 2].flatten()
    store.compact(last, torch.arange(40).expand(len(last), 40) != 5)
    tiers.check()
    assert tiers.pages_used == one + LAYERS * HEADS  # the page that a gap is in
    tiers.select(torch.tensor([0]))
    assert tiers.pages_used == one
