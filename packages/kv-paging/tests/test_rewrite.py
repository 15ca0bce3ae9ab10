"""Vectors that are encoded again in place, beside the rows read before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halves import Halves
from kv_paging import BOTH, PagePool, PerHeadRankTiers, PoolExhausted, Tiers, fit
from kv_paging.store import TokenStore
from kv_policy import PageLayout, RawCodec, TokenFormat

LAYERS, HEADS, DIM = 2, 3, 4
RAW = RawCodec(DIM, torch.float32)
FORMATS = {
    "raw": TokenFormat(RAW, RAW),
    "bf16": TokenFormat(RawCodec(DIM, torch.bfloat16), RawCodec(DIM, torch.bfloat16)),
    "fp16 values": TokenFormat(RAW, RawCodec(DIM, torch.float16)),
}


def filled(form: TokenFormat, lengths: list[int], pages: int | None = None) -> Tiers:
    """Return tiers of one sequence whose rows hold these many random tokens."""
    (layout,) = fit([form], 4, scores=True, positions=True)
    pool = PagePool(layout.nbytes, pages or 0, grows=pages is None, poison=True)
    tiers = Tiers(pool, [layout], LAYERS, 1, HEADS)
    most = max(lengths)
    keep = torch.arange(most) < torch.tensor(lengths)[:, None]
    place = torch.arange(most).expand(len(lengths), -1)
    key, value = torch.randn(2, *keep.shape, DIM, generator=torch.Generator().manual_seed(most))
    tiers.append(0, tiers.table_rows(), key, value, keep, place.float(), place)
    return tiers


def expect(
    store: TokenStore, before: dict[str, Tensor], some: Tensor, new: dict[str, Tensor]
) -> None:
    """Check that exactly the marked tokens of all rows have other vectors, and the same scores."""
    read = store.read(store.table_rows(), BOTH)
    for name in ("held", "score", "position", "key", "value"):
        right = before[name].clone()
        if name in new:
            codec = getattr(store.layout.format, name)
            right[some] = codec.decode(codec.encode(new[name][:, None]))[:, 0].to(right.dtype)
        assert torch.equal(getattr(read, name), right)


def read_all(store: TokenStore) -> dict[str, Tensor]:
    """Return all that is stored."""
    read = store.read(store.table_rows(), BOTH)
    return {
        name: getattr(read, name).clone() for name in ("held", "score", "position", "key", "value")
    }


@given(
    name=st.sampled_from([*FORMATS]),
    lengths=st.lists(st.integers(0, 11), min_size=6, max_size=6),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    keys=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_marked_tokens_change_and_no_others(
    name: str, lengths: list[int], share: float, *, keys: bool, seed: int
) -> None:
    tiers = filled(FORMATS[name], lengths)
    (store,) = tiers.stores
    before, draw = read_all(store), torch.Generator().manual_seed(seed)
    some = before["held"] & (torch.rand(before["held"].shape, generator=draw) < share)
    new = {"value": torch.randn(int(some.sum()), DIM, generator=draw)}
    if keys:
        new["key"] = torch.randn(int(some.sum()), DIM, generator=draw)
    rows = torch.randperm(6, generator=draw)  # in any order
    parts = {n: torch.zeros(*some.shape, DIM).index_put((some,), x) for n, x in new.items()}
    given = {n: x[rows][some[rows]] for n, x in parts.items()}
    store.rewrite(rows, some[rows], given.get("key"), given["value"])
    expect(store, before, some, new)
    tiers.check()


def test_pages_of_others_are_copied_first() -> None:
    tiers = filled(FORMATS["raw"], [8] * 6)
    tiers.select(torch.tensor([0, 0]), share=True)
    (store,) = tiers.stores
    used, before = tiers.pool.used, read_all(store)
    rows = store.table_rows().view(LAYERS, 2, HEADS)[:, 1].flatten()
    some = torch.zeros(6, 8, dtype=torch.bool)
    some[:, 5] = True  # of the second page
    new = torch.randn(6, DIM)
    store.rewrite(rows, some, new, new)
    assert tiers.pool.used == used + 6
    where = torch.zeros(12, 8, dtype=torch.bool)
    where[rows] = some
    expect(store, before, where, {"key": new, "value": new})
    tiers.check()


def test_a_pool_without_pages_for_copies_changes_nothing() -> None:
    tiers = filled(FORMATS["raw"], [8] * 6, pages=13)
    tiers.select(torch.tensor([0, 0]), share=True)
    (store,) = tiers.stores
    before, some = read_all(store), torch.ones(6, 8, dtype=torch.bool)
    rows = store.table_rows().view(LAYERS, 2, HEADS)[:, 1].flatten()
    with pytest.raises(PoolExhausted):
        store.rewrite(rows, some, None, torch.zeros(48, DIM))
    expect(store, before, some, {})
    tiers.check()


def test_heads_of_several_ranks_take_their_part() -> None:
    ranks = [(4, 2), (3, 4)]
    forms = [TokenFormat(RawCodec(k, torch.float32), RawCodec(v, torch.float32)) for k, v in ranks]
    layouts = [[PageLayout.fitted(form, 200, scores=True, positions=True)] for form in forms]
    pool = PagePool(200, grows=True, poison=True)
    tiers = PerHeadRankTiers(pool, layouts, torch.tensor([[0, 1, 0], [1, 1, 0]]), 1)
    draw = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 6, 7, DIM, generator=draw)
    place = torch.arange(7).expand(6, 7)
    tiers.append(0, tiers.table_rows(), key, value, place >= 0, place.float(), place)
    (store,) = tiers.stores
    before = store.read(store.table_rows(), BOTH)
    some = torch.rand(6, 7, generator=draw) < 0.4
    new = torch.randn(2, int(some.sum()), DIM, generator=draw)
    store.rewrite(store.table_rows(), some, new[0], new[1])
    after = store.read(store.table_rows(), BOTH)
    for old, now, x in ((before.key, after.key, new[0]), (before.value, after.value, new[1])):
        assert old is not None
        assert now is not None
        assert torch.equal(now[~some], old[~some])
        assert torch.equal(now[some], x * (old[some] != 0))  # zeros beyond the rank
    assert torch.equal(before.score, after.score)
    tiers.check()


def test_what_cannot_be_rewritten_is_refused() -> None:
    tiers = filled(FORMATS["raw"], [3, 4, 4, 4, 4, 4])
    (store,) = tiers.stores
    some, value = torch.ones(6, 4, dtype=torch.bool), torch.zeros(24, DIM)
    with pytest.raises(ValueError, match="1 marked slots hold no token"):
        store.rewrite(store.table_rows(), some, None, value)
    some[0, 3] = False
    with pytest.raises(ValueError, match="value has the shape"):
        store.rewrite(store.table_rows(), some, None, value)
    with pytest.raises(ValueError, match="key has the shape"):
        store.rewrite(store.table_rows(), some, value[1:, :2], value[1:])
    with pytest.raises(ValueError, match="named twice"):
        store.rewrite(store.table_rows() * 0, some, None, value[1:])
    (layout,) = fit([TokenFormat(Halves(DIM), Halves(DIM))], 4, scores=True, positions=True)
    blocks = Tiers(PagePool(layout.nbytes, grows=True), [layout], 1, 1, 1, raw=FORMATS["raw"])
    with pytest.raises(ValueError, match="encodes each vector separately"):
        blocks.stores[0].rewrite(blocks.table_rows(), some[:1], None, value[:3])
