"""Sequences that hold the same pages: counted once, copied when one of them writes."""

import pytest
import torch

from halves import Halves
from kv_paging import BOTH, PagePool, PoolExhausted, Tiers, fit
from kv_policy import DROP, RawCodec, TokenFormat

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


def empty(tiers: Tiers) -> Tiers:
    """Return empty tiers of one sequence over the pool of others."""
    return Tiers(tiers.pool, [each.layout for each in tiers.parts], LAYERS, 1, HEADS)


@pytest.mark.parametrize("share", [False, True])
def test_a_branch_holds_the_tokens_of_a_sequence(share: bool) -> None:
    tiers = document(43)
    tiers.select(torch.tensor([0, 0]))
    (store,), other = tiers.stores, empty(tiers)
    rows = store.table_rows().view(LAYERS, 2, HEADS)[:, 1].flatten()
    store.compact(rows, torch.arange(43).expand(len(rows), 43) % 4 > 0)
    used = tiers.pool.used
    tiers.branch(1, other, share=share)
    full = 32 // TOKENS  # a head has 32 tokens left
    assert tiers.pool.used == used + LAYERS * HEADS * (0 if share else full)
    assert other.shared_pages().tolist() == [share * LAYERS * HEADS * full]
    tiers.pool.check(torch.cat((tiers.pages(), other.pages())))
    mine, theirs = store.read(rows, BOTH), other.stores[0].read(other.table_rows(), BOTH)
    for name in ("key", "value", "score", "position"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    tiers.release()
    again = other.stores[0].read(other.table_rows(), BOTH)
    assert torch.equal(again.key, theirs.key)
    other.check()


def test_a_whole_branch_copies_no_page() -> None:
    tiers = document(43)
    other, used = empty(tiers), tiers.pool.used
    tiers.branch(0, other, whole=True)
    assert tiers.pool.used == used
    tiers.release()
    other.check()
    assert tiers.pool.used == used
    assert other.counts().sum() == 43 * LAYERS * HEADS


def test_a_branch_without_pages_for_copies_changes_nothing() -> None:
    tiers = document(43, pages=LAYERS * HEADS * 6 + 1)
    other = empty(tiers)
    with pytest.raises(PoolExhausted):
        tiers.branch(0, other, share=True)
    assert not other.counts().any()
    tiers.check()
    with pytest.raises(ValueError, match="sequence 1 does not exist; there are 1"):
        tiers.branch(1, other)


def test_a_branch_knows_the_holes_of_blocks() -> None:
    form = TokenFormat(Halves(DIM), Halves(DIM))
    (layout,) = fit([form], TOKENS, scores=True, positions=True)
    pool = PagePool(layout.nbytes, poison=True)
    raw = TokenFormat(RawCodec(DIM, torch.float32), RawCodec(DIM, torch.float32))
    tiers, other = (Tiers(pool, [layout], LAYERS, 1, HEADS, raw=raw) for _ in range(2))
    rows = tiers.table_rows()
    tiers.append(0, rows, *tokens(len(rows), 22), *beside(len(rows), 22))
    for _ in range(3):
        score, place = tiers.weakest()
        drop = torch.full((len(rows),), DROP, dtype=torch.uint8)
        first = torch.zeros_like(drop)
        key, value, _ = tokens(len(rows))
        given = torch.full((len(rows),), 9.0), torch.full((len(rows),), 99)
        tiers.step(first, first, drop, place, key, value, *given)
        assert bool(score.isfinite().all())
    tiers.branch(0, other, share=True)
    assert torch.equal(other.counts(), tiers.counts())
    assert tiers.stores[0].live.sum() < tiers.stores[0].length.sum()  # some are holes
    pool.check(torch.cat((tiers.pages(), other.pages())))
