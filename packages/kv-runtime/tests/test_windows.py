"""The raw window in pages, next to the one in memory of its own, and batches that share a pool."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_paging import BOTH, PagePool, PoolExhausted, RankGroups, torch_kernels
from kv_policy import CacheShape, RunningMean, RunningSum, compose
from kv_runtime.batch import Batch
from kv_runtime.layout import Layout
from kv_runtime.window.base import Window
from kv_runtime.window.dense import RawWindow
from kv_runtime.window.paged import PagedWindow
from kv_runtime.window.ragged import RaggedWindow
from tiered_policies import POLICIES, SHAPE, Exact, Turned
from tiered_world import World, one, ragged

PAGE = 160  # bytes: 3 tokens of 48 bytes with a score
SMALL = CacheShape(layers=3, kv_heads=2, group=2, key_dim=4, value_dim=5, dtype=torch.float32)
KINDS = torch.tensor([[0, 1], [1, 1], [1, 0]])


def rings(kind: str, pool: PagePool | None, sequences: int, size: int, scores: bool) -> Window:
    """A window of SHAPE, in pages of a pool if one is given; `ragged` has heads of two kinds."""

    def made(shape: CacheShape) -> RawWindow | PagedWindow:
        if pool is not None:
            return PagedWindow(pool, shape, sequences, size, scores)
        return RawWindow(shape, sequences, size, torch.device("cpu"), scores)

    if kind == "alike":
        return made(SHAPE)
    kinds = RankGroups(KINDS, sequences)
    shapes = [
        CacheShape(n, 1, 1, like.key_dim, like.value_dim, dtype=SHAPE.dtype)
        for n, like in zip(kinds.cells, (SHAPE, SMALL), strict=True)
    ]
    return RaggedWindow(kinds, [made(shape) for shape in shapes])


def expect_pages(window: Window) -> None:
    """Expect that a window in separate memory has the same slots in pages, as attention reads."""
    for ring in window.members if isinstance(window, RaggedWindow) else (window,):
        assert isinstance(ring, RawWindow)
        for layer, each in enumerate(ring.views() or ()):
            row, length = each.table.reshape(-1, 1, 1), each.length.reshape(-1, 1)
            scratch = torch.zeros_like(each.data[:1])
            data = torch.cat((each.data, scratch))
            rows = replace(each, data=data, table=row, length=length)
            found = torch_kernels.read(rows, torch.arange(len(row)), ring.size, BOTH)
            assert torch.equal(found.held.sum(1, keepdim=True), length)
            wanted = [ring.keys(layer), ring.values(layer)]
            wanted += [ring.scores_of(slice(layer, layer + 1))[0]] if ring.has_scores else []
            for mine, theirs in zip((found.key, found.value, found.score), wanted, strict=False):
                assert torch.equal(mine[found.held], theirs.flatten(0, 1)[found.held])


class Pairs:
    """Two windows of each sort that get the same, and how many tokens each sequence has."""

    def __init__(self, kind: str, size: int, scores: bool, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        memory = torch.zeros(401, PAGE, dtype=torch.uint8)
        self.kind, self.size, self.scores = kind, size, scores
        self.pool = PagePool.over(memory, poison=True)
        self.pairs: list[tuple[Window, Window, Tensor]] = []

    def begin(self) -> None:
        count = 1 + self.below(2)
        made = [rings(self.kind, pool, count, self.size, self.scores) for pool in (None, self.pool)]
        self.pairs.append((made[0], made[1], torch.zeros(count, dtype=torch.long)))

    def below(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self.random))

    def fresh(self, count: int, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        lead = (SHAPE.layers, count, SHAPE.kv_heads, width)
        key, value = (torch.randn(*lead, d, generator=self.random) for d in (6, 5))
        if self.kind == "ragged":
            key[KINDS[:, None].expand(lead[:3]) == 1, :, 4:] = 0
        return key, value, torch.rand(lead, generator=self.random) if self.scores else None

    def columns(self, seen: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Positions of new columns, some of them padding, and tokens seen after them."""
        valid = torch.rand(len(seen), width, generator=self.random) < 0.8
        count = valid.long().cumsum(1)
        return (seen[:, None] + count - 1).masked_fill(~valid, -1), seen + count[:, -1]

    def put(self) -> None:
        at = self.below(len(self.pairs))
        raw, paged, seen = self.pairs[at]
        width = 1 + self.below(3 * self.size)
        position, total = self.columns(seen, width)
        key, value, score = self.fresh(len(seen), width)
        for window in (raw, paged):
            for i in range(SHAPE.layers):
                each = slice(i, i + 1)
                mine = None if score is None else score[each]
                window.put(each, key[each], value[each], position, total, mine)
            window.advance(position, total)
        self.pairs[at] = (raw, paged, total)

    def exchange(self) -> None:
        at = self.below(len(self.pairs))
        raw, paged, seen = self.pairs[at]
        position, total = self.columns(seen, 1)
        given = self.fresh(len(seen), 1)
        first, second = (w.exchange(*given[:2], position, total, given[2]) for w in (raw, paged))
        for mine, wanted in zip(first, second, strict=True):
            assert (mine is None) == (wanted is None)
            assert mine is None or torch.equal(mine, wanted)
        for window in (raw, paged):
            window.advance(position, total)
        self.pairs[at] = (raw, paged, total)

    def lend(self) -> None:
        """Exchange tokens in some layers alone, and put back what they replaced."""
        raw, paged, seen = self.pairs[self.below(len(self.pairs))]
        first = self.below(SHAPE.layers)
        layers = slice(first, first + 1 + self.below(SHAPE.layers - first))
        key, value, _ = self.fresh(len(seen), 1)
        position, total = self.columns(seen, 1)
        for window in (raw, paged):
            before = window.position.clone()
            old_key, old_value, _, score = window.exchange(
                key[layers], value[layers], position, total, layers=layers
            )
            assert score is None
            window.hold_newest(total)
            held = window.position.gather(1, position.clamp(min=0) % self.size)
            assert torch.equal(held.where(position >= 0, -1), position)
            window.exchange(old_key, old_value, position, total, layers=layers)
            window.hold_newest(seen)
            assert torch.equal(window.position, before)

    def rescore(self) -> None:
        raw, paged, seen = self.pairs[self.below(len(self.pairs))]
        if self.scores:
            layers = slice(self.below(SHAPE.layers), SHAPE.layers)
            lead = SHAPE.layers - layers.start, len(seen), SHAPE.kv_heads
            score = torch.rand(*lead, self.size, generator=self.random)
            raw.set_scores_of(layers, score)
            paged.set_scores_of(layers, score)

    def accumulate(self) -> None:
        raw, paged, seen = self.pairs[self.below(len(self.pairs))]
        if self.scores:
            layers = slice(self.below(SHAPE.layers), SHAPE.layers)
            lead = SHAPE.layers - layers.start, len(seen), SHAPE.kv_heads, self.size
            mass = torch.rand(lead, generator=self.random)
            count = torch.randint(0, 3, lead, generator=self.random)
            running = (RunningMean(), RunningMean(2), RunningSum(3))[self.below(3)]
            before = seen.masked_fill(torch.rand(len(seen), generator=self.random) < 0.3, -1)
            for window in (raw, paged):
                window.accumulate(layers, before, mass, count, running)

    def select(self) -> None:
        at = self.below(len(self.pairs))
        raw, paged, seen = self.pairs[at]
        source = torch.randint(0, len(seen), (1 + self.below(3),), generator=self.random)
        raw.select(source)
        paged.select(source)
        self.pairs[at] = (raw, paged, seen[source])

    def join(self) -> None:
        if len(self.pairs) > 1:
            raw, paged, seen = self.pairs.pop()
            self.pairs[0][0].join(raw)
            self.pairs[0][1].join(paged)
            self.pairs[0] = (*self.pairs[0][:2], torch.cat((self.pairs[0][2], seen)))
            assert not len(raw.position) + len(paged.position)

    def check(self) -> None:
        held = [store.pages() for _, paged, _ in self.pairs for store in paged.stores]
        self.pool.check(torch.cat(held))
        for raw, paged, seen in self.pairs:
            assert torch.equal(raw.position, paged.position)
            assert raw.has_scores == paged.has_scores == self.scores
            expect_pages(raw)
            each = sum(store.sequence_pages() for store in paged.stores)
            assert each.tolist() == [self.pages] * len(seen)
            for name in ("keys_of", "values_of", *(["scores_of"] if self.scores else [])):
                every = (getattr(window, name)(slice(None)) for window in (raw, paged))
                assert torch.equal(*every)
            for layer in range(SHAPE.layers):
                for mine, wanted in zip(raw.in_order(layer), paged.in_order(layer), strict=True):
                    assert torch.equal(mine, wanted)

    @property
    def pages(self) -> int:
        """Pages of a sequence: ceil(size / tokens a page) for each layer and head."""
        tokens = [PAGE // (44 + 4 * self.scores), PAGE // (36 + 4 * self.scores)]
        cells = [6, 0] if self.kind == "alike" else [2, 4]
        return sum(n * -(-self.size // t) for n, t in zip(cells, tokens, strict=True))


@pytest.mark.parametrize("kind", ["alike", "ragged"])
@settings(deadline=None, derandomize=True, max_examples=8)
@given(
    size=st.integers(1, 7),
    scores=st.booleans(),
    seed=st.integers(0, 10**6),
    names=st.lists(
        st.sampled_from(
            (
                *("begin", "put", "exchange", "exchange", "lend", "lend"),
                *("accumulate", "rescore", "select", "join"),
            )
        ),
        max_size=12,
    ),
)
def test_both_windows_hold_the_same(
    kind: str, size: int, scores: bool, seed: int, names: list[str]
) -> None:
    pairs = Pairs(kind, size, scores, seed)
    for name in ("begin", "put", *names):
        before = [raw.keys_of(slice(None)).clone() for raw, *_ in pairs.pairs]
        getattr(pairs, name)()
        pairs.check()
        if name == "lend":
            after = [raw.keys_of(slice(None)) for raw, *_ in pairs.pairs]
            assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    for _, paged, _ in pairs.pairs:
        paged.release()
    assert pairs.pool.free == pairs.pool.capacity


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("size", [1, 5, 8])
def test_odd_slots_of_every_dtype_are_held_in_pages(
    dtype: torch.dtype, scores: bool, size: int
) -> None:
    shape = replace(SHAPE, key_dim=5, value_dim=4, dtype=dtype)
    window = RawWindow(shape, 2, size, torch.device("cpu"), scores)
    lead, g = (shape.layers, 2, shape.kv_heads, 7), torch.Generator().manual_seed(size)
    key, value = (torch.randn(*lead, d, generator=g).to(dtype) for d in (5, 4))
    score = torch.rand(lead, generator=g) if scores else None
    position, total = torch.arange(7).expand(2, 7), torch.full((2,), 7)
    window.put(slice(None), key, value, position, total, score)
    window.advance(position, total)
    expect_pages(window)
    least = min(7, size)
    for layer in range(shape.layers):
        mine = window.in_order(layer)
        for found, wanted in zip(mine[:2], (key, value), strict=True):
            assert torch.equal(found[..., -least:, :], wanted[layer][..., -least:, :])


def test_windows_that_cannot_join_are_refused() -> None:
    pool = PagePool(PAGE)
    raw, paged = (rings("alike", p, 1, 4, True) for p in (None, pool))
    with pytest.raises(ValueError, match="PagedWindow cannot join a RawWindow"):
        raw.join(paged)
    for window, mine in ((raw, None), (paged, pool)):
        with pytest.raises(ValueError, match="a window of 5 tokens cannot join one of 4"):
            window.join(rings("alike", mine, 1, 5, True))
    with pytest.raises(ValueError, match="and no scores cannot join one of 3 layers"):
        raw.join(rings("alike", None, 1, 4, False))
    with pytest.raises(ValueError, match="two pools"):
        paged.join(rings("alike", PagePool(PAGE), 1, 4, True))


@pytest.mark.parametrize("name", ["streaming-window", "bykey-replan-window", "ladder-blocks"])
def test_a_cache_with_its_window_in_pages_attends_over_what_it_keeps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Batch.allocate

    def allocate(*given: object, **named: object) -> Batch:
        return made(*given, **(named | {"window_in_pages": True}))

    monkeypatch.setattr("kv_runtime.cache.Batch.allocate", allocate)
    world = World(POLICIES[name])
    world.forward(ragged(31, 3))
    for _ in range(5):
        world.forward(one())
    chosen = torch.tensor([1, 1, 0])
    world.cache.select(chosen)
    world.sequences = 3
    world.key, world.value = world.key[:, chosen], world.value[:, chosen]
    world.seen = world.seen[chosen]
    for _ in range(4):
        world.forward(one(3))
    report, batch = world.cache.memory(), world.cache.batch
    parts = ("vector", "score", "position", "unfilled", "spare", "window", "table", "basis")
    assert sum(getattr(report, part + "_bytes") for part in parts) == report.total_bytes
    assert batch.window.nbytes == report.window_bytes < batch.window.keys(0).numel() * 4
    assert report.unfilled_bytes >= 0
    tokens = int(report.tokens.sum())
    assert (report.vector_bytes, report.score_bytes) == (44 * tokens, 4 * tokens)
    assert int(batch.pages_used().sum()) == report.pages_used == batch.pool.used
    batch.release()
    assert batch.pool.used == 0


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("basis", [None, Turned(key_ranks="63", value_ranks="5")])
def test_batches_share_a_pool_join_and_go(basis: Turned | None, in_pages: bool) -> None:
    policy = POLICIES["streaming-window"]
    if basis is not None:
        policy = compose(policy, basis)
    world = World(policy)
    layout = world.cache.layout
    pool = PagePool.over(torch.zeros(301, layout.page_bytes, dtype=torch.uint8), poison=True)

    def batch(count: int) -> Batch:
        device = torch.device("cpu")
        return Batch.allocate(
            policy, layout, count, None, device, pool=pool, window_in_pages=in_pages
        )

    mine, other = batch(1), batch(2)
    each = int(other.pages_used()[0])
    assert (each > 0) == in_pages
    other.seen, other.columns, other.started = torch.tensor([4, 9]), 12, True
    mine.seen, mine.columns, mine.started = torch.tensor([3]), 20, True
    mine.reserve(torch.full((1,), 4 * layout.page_tokens[0, 0, 0]))
    free = pool.free
    mine.settle()
    assert pool.free == free
    mine.join(other)
    pool.check(torch.cat((mine.pages(), other.pages())))
    assert (mine.seen.tolist(), mine.columns, mine.started) == ([3, 4, 9], 20, True)
    assert (len(other.seen), other.columns, other.pages_used().tolist()) == (0, 0, [])
    assert mine.pages_used().tolist() == [each] * 3
    mine.select(torch.tensor([2, 0]))
    assert mine.seen.tolist() == [9, 3]
    assert mine.memory(SHAPE.token_bytes, 0).pages_used == 2 * each
    mine.release()
    assert pool.free == pool.capacity
    mine.join(batch(1))
    assert len(mine.seen) == 1
    wide = Layout.of(policy, SHAPE, None, 8)
    with pytest.raises(ValueError, match="have different page layouts"):
        mine.join(Batch.allocate(policy, wide, 1, None, torch.device("cpu")))


def test_a_batch_never_asks_for_pages_that_others_hold() -> None:
    """With pages of others in use, those of its own are counted off, and no more."""
    policy = Exact(1)
    layout = Layout.of(policy, SHAPE, None, 4)
    pool = PagePool.over(torch.zeros(25, layout.page_bytes, dtype=torch.uint8))
    first, second = (
        Batch.allocate(policy, layout, 1, None, torch.device("cpu"), pool=pool) for _ in range(2)
    )
    pool.allocate(12)
    first.reserve(torch.tensor([8]))  # 12 pages, and 12 are free
    with pytest.raises(PoolExhausted, match="18 pages are needed and 12 are free"):
        second.reserve(torch.tensor([12]))
    with pytest.raises(ValueError, match="both a pool and 3 pages were given"):
        Batch.allocate(policy, layout, 1, 3, torch.device("cpu"), pool=pool)
