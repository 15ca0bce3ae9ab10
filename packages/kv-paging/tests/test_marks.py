"""What is appended after a mark is taken back: tokens, bytes and pages are those before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halves import Halves
from kv_paging import BOTH, PagePool, PerHeadRankTiers, Tiers, fit
from kv_policy import RawCodec, TokenFormat

LAYERS, SEQUENCES, HEADS, DIM = 2, 3, 2, 4
KINDS = torch.tensor([[0, 1], [1, 1]])


def form(dim: int, block: int) -> TokenFormat:
    codec = RawCodec(dim, torch.float32) if block == 1 else Halves(dim)
    return TokenFormat(codec, codec)


def made(kind: str, page_tokens: int) -> Tiers | PerHeadRankTiers:
    """Empty tiers; `blocks` encode two tokens together, heads of `ragged` have two sizes."""
    block = 2 if "blocks" in kind else 1
    dims = (DIM, DIM - 1) if "ragged" in kind else (DIM,)
    layouts = fit([form(dim, block) for dim in dims], page_tokens, scores=True, positions=True)
    pool = PagePool(layouts[0].nbytes, 400, poison=True)
    raws = [form(dim, 1) for dim in dims]
    if len(dims) == 1:
        return Tiers(pool, layouts, LAYERS, SEQUENCES, HEADS, raw=raws[0])
    return PerHeadRankTiers(pool, [[each] for each in layouts], KINDS, SEQUENCES, raw=raws)


def append(tiers: Tiers | PerHeadRankTiers, rows: Tensor, keep: Tensor, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, *keep.shape, DIM, generator=draw)
    if isinstance(tiers, PerHeadRankTiers):
        short = KINDS[:, None].expand(LAYERS, SEQUENCES, HEADS).flatten()[rows] == 1
        key[short, :, -1] = value[short, :, -1] = 0
    score = torch.rand(keep.shape, generator=draw)
    place = torch.arange(keep.shape[1]).expand(keep.shape) + 1000 * seed
    tiers.append(0, rows, key, value, keep, score, place)


def content(tiers: Tiers | PerHeadRankTiers) -> list[Tensor]:
    found = []
    for store in tiers.parts:
        read = store.read(store.table_rows(), BOTH)
        found += [store.length.clone(), read.key, read.value, read.score, read.position]
    return found


@pytest.mark.parametrize("kind", ["tokens", "blocks", "ragged", "ragged-blocks"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(0, 9), more=st.integers(1, 7))
def test_what_is_taken_back_leaves_no_trace(kind: str, seed: int, tokens: int, more: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    tiers = made(kind, 8 if "blocks" in kind else 3)
    every = tiers.table_rows()
    keep = torch.rand(len(every), tokens, generator=draw) < 0.8
    append(tiers, every, keep, 1)
    before, used = content(tiers), tiers.pool.used
    layer = int(torch.randint(0, LAYERS, (), generator=draw))
    rows = tiers.table_rows(slice(layer, layer + 1))
    marks = tiers.marked(rows)
    for i in range(more):
        some = torch.rand(len(rows), 1, generator=draw) < 0.7
        append(tiers, rows, some, 2 + i)
    for mark in marks:
        mark.take_back()
    assert tiers.pool.used == used
    tiers.check()
    for mine, wanted in zip(content(tiers), before, strict=True):
        assert torch.equal(mine, wanted)


def test_a_page_that_others_hold_stays_theirs() -> None:
    """Taking tokens back copies no full page of a stored prefix."""
    (layout,) = fit([form(DIM, 1)], 4, scores=True, positions=True)
    pool = PagePool(layout.nbytes, 400, poison=True)
    tiers = Tiers(pool, [layout], LAYERS, 1, HEADS)
    rows = tiers.table_rows()
    append(tiers, rows, torch.ones(len(rows), 8, dtype=torch.bool), 1)
    tiers.select(torch.tensor([0, 0]), share=True)
    used, rows = pool.used, tiers.table_rows()
    before = content(tiers)
    (mark,) = tiers.marked(rows)
    append(tiers, rows, torch.ones(len(rows), 3, dtype=torch.bool), 2)
    mark.take_back()
    assert pool.used == used
    tiers.check()
    assert all(torch.equal(x, y) for x, y in zip(content(tiers), before, strict=True))
