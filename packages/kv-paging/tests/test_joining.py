"""Batches over external memory that join and split, compared with separate sequences."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halves import Halves
from kv_paging import BOTH, PagePool, PerHeadRankTiers, PoolExhausted, Tiers, TokenStore, fit
from kv_paging.moves import block_segments, take_pages
from kv_policy import DROP, NOBODY, PageLayout, RawCodec, TokenFormat

LAYERS, HEADS, DIM = 2, 2, 3
WIDE = TokenFormat(RawCodec(DIM, torch.float32), RawCodec(DIM, torch.float32))
SMALL = TokenFormat(RawCodec(DIM, torch.float16), RawCodec(DIM, torch.float16))
KINDS = [[0, 1], [1, 0]]  # of each layer and head, where heads differ


BLOCKS = TokenFormat(Halves(DIM), Halves(DIM))
FORMATS = {
    "two tiers": [WIDE, SMALL],
    "three tiers": [WIDE, SMALL, SMALL],
    "blocks below": [WIDE, BLOCKS],
}
Operation = tuple[str, tuple[Tensor, ...]]  # on the table rows of one sequence


class Shared:
    """Batches over one pool, and the operations on each of their sequences."""

    def __init__(self, kind: str, ragged: bool, seed: int, pages: int = 400) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.ragged, self.formats = ragged, FORMATS[kind]
        forms = [*self.formats]
        if ragged:
            forms += [_short(form) for form in self.formats]
        self.layouts = fit(forms, 4, True, True)
        page = self.layouts[0].nbytes
        memory = torch.full((pages + 1, page + 4), 0xFF, dtype=torch.uint8)  # rows have gaps
        self.pool = PagePool.over(memory[:, :page], poison=True)
        self.batches: list[tuple[Tiers | PerHeadRankTiers, list[list[Operation]]]] = []

    def tiers(self, pool: PagePool, sequences: int) -> Tiers | PerHeadRankTiers:
        if not self.ragged:
            return Tiers(pool, self.layouts, LAYERS, sequences, HEADS, raw=WIDE)
        count = len(self.formats)
        each = [self.layouts[:count], self.layouts[count:]]
        raw = [WIDE, _short(WIDE)]
        return PerHeadRankTiers(pool, each, torch.tensor(KINDS), sequences, raw=raw)

    def below(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self.random))

    def some(self) -> int:
        return self.below(len(self.batches))

    def begin(self) -> None:
        count = 1 + self.below(2)
        self.batches.append((self.tiers(self.pool, count), [[] for _ in range(count)]))

    def tokens(self, *lead: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key, value = torch.randn(2, *lead, DIM, generator=self.random)
        if self.ragged:
            kind = torch.tensor(KINDS)[:, None].expand(lead[:3])
            for x in (key, value):
                x[..., -1][kind == 1] = 0
        score = torch.rand(lead, generator=self.random)
        place = torch.randint(0, 1000, lead, generator=self.random)
        return key, value, score, place

    def act(self, batch: int, name: str, *args: Tensor) -> None:
        """Apply an operation to all sequences; `args` are [N, B, H, ...]."""
        tiers, done = self.batches[batch]
        _do(tiers, name, [x.flatten(0, 2) for x in args])
        for sequence, log in enumerate(done):
            log.append((name, tuple(x[:, sequence : sequence + 1].clone() for x in args)))

    def append(self) -> None:
        batch = self.some()
        lead = (LAYERS, len(self.batches[batch][1]), HEADS, self.below(9))
        if lead[1]:
            keep = torch.rand(lead, generator=self.random) < 0.7
            tier = torch.full(lead[:3], self.below(len(self.formats)))
            self.act(batch, "append", tier, keep, *self.tokens(*lead))

    def step(self) -> None:
        batch, ways = self.some(), len(self.formats)
        lead = (LAYERS, len(self.batches[batch][1]), HEADS)
        if lead[1]:
            enters, leaves = torch.randint(0, ways + 1, (2, *lead), generator=self.random)
            to = leaves + 1 + torch.randint(0, ways, lead, generator=self.random)
            enters = enters.where(enters < ways, DROP)
            leaves = leaves.where(leaves < ways, NOBODY)
            self.act(batch, "step", enters, leaves, to.where(to < ways, DROP), *self.tokens(*lead))

    def grow(self) -> None:
        batch = self.some()
        lead = (LAYERS, len(self.batches[batch][1]), HEADS)
        if lead[1]:
            some = torch.rand(lead, generator=self.random) < 0.7
            self.act(batch, "grow", some, *self.tokens(*lead))

    def join(self) -> None:
        mine, other = self.some(), self.some()
        if mine != other:
            lost = self.pool.data.clone()
            self.batches[mine][0].join(self.batches[other][0])
            assert torch.equal(self.pool.data, lost)  # no byte of a page moved
            self.batches[mine][1].extend(self.batches[other][1])
            self.batches[other] = (self.batches[other][0], [])

    def select(self) -> None:
        batch = self.some()
        tiers, done = self.batches[batch]
        if done:
            source = torch.randint(0, len(done), (1 + self.below(3),), generator=self.random)
            tiers.select(source, share=self.below(3) > 0)
            self.batches[batch] = (tiers, [list(done[i]) for i in source.tolist()])

    def clear(self) -> None:
        batch = self.some()
        tiers, done = self.batches[batch]
        if done:
            gone = self.below(len(done))
            tiers.clear(torch.tensor([gone]))
            done[gone] = []

    def release(self) -> None:
        batch = self.some()
        self.check_alike(batch)
        self.batches[batch][0].release()
        self.batches[batch] = (self.batches[batch][0], [])

    def check_pages(self) -> None:
        self.pool.check(torch.cat([tiers.pages() for tiers, _ in self.batches]))

    def check_alike(self, batch: int) -> None:
        """Check that each sequence of a batch equals one with the same operations alone."""
        tiers, done = self.batches[batch]
        assert tiers.counts().shape[2] == len(done)
        for sequence, log in enumerate(done):
            alone = self.tiers(PagePool(self.pool.page_bytes, poison=True), 1)
            for name, args in log:
                _do(alone, name, [x.flatten(0, 2) for x in args])
            for mine, wanted in zip(tiers.parts, alone.parts, strict=True):
                assert mine.longest >= int(mine.length.amax())
                assert _held(mine, sequence) == _held(wanted, 0)
                assert torch.equal(mine.live[:, sequence], wanted.live[:, 0])


def _short(form: TokenFormat) -> TokenFormat:
    return TokenFormat(*(replace(codec, dim=DIM - 1) for codec in (form.key, form.value)))


def _do(tiers: Tiers | PerHeadRankTiers, name: str, args: list[Tensor]) -> None:
    if name == "append":
        tier, keep, key, value, score, place = args
        tiers.append(int(tier[0]), tiers.table_rows(), key, value, keep, score, place)
    elif name == "grow":
        tiers.grow(*args)
    else:
        *choice, key, value, score, place = args
        enters, leaves, to = (x.to(torch.uint8) for x in choice)
        tiers.step(enters, leaves, to, tiers.weakest()[1], key, value, score, place)


def _held(store: TokenStore, sequence: int) -> list[list[list[int]]]:
    """Return the bytes of each row and layout part, including positions and scores."""
    table_rows = store.table_rows().view(store.length.shape)[:, sequence].flatten()
    found, block = [], store.layout.format.block
    for table_row, length in zip(
        table_rows, store.length.flatten()[table_rows].tolist(), strict=True
    ):
        pages = store.page_table.block(table_row[None], -(-length // store.layout.tokens))
        rows = [take_pages(store.pool.data, s, pages)[0] for s in block_segments(store.layout)]
        found.append([part[: length // block].flatten().tolist() for part in rows])
    return found


STEPS = (
    *("begin", "append", "append", "step", "step", "step", "grow", "grow"),
    *("join", "select", "select", "clear", "release"),
)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, derandomize=True, max_examples=5)
@given(seed=st.integers(0, 10**6), names=st.lists(st.sampled_from(STEPS), min_size=10, max_size=20))
def test_a_sequence_is_what_it_is_alone(
    kind: str, ragged: bool, seed: int, names: list[str]
) -> None:
    shared = Shared(kind, ragged, seed)
    for name in ("begin", "append", "begin", "append", *names):
        getattr(shared, name)()
        shared.check_pages()
    for batch, (tiers, _) in enumerate(shared.batches):
        shared.check_alike(batch)
        tiers.release()
    assert shared.pool.free == shared.pool.capacity


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", ["two tiers", "blocks below"])
@pytest.mark.parametrize("longer", [0, 1])
def test_tables_of_other_widths_and_numbers_of_holes_join(
    kind: str, longer: int, ragged: bool
) -> None:
    """Both have tokens at both ends of their tables, and one table is wider."""
    shared = Shared(kind, ragged, 3)
    for batch in range(2):
        shared.begin()
        lead = (LAYERS, len(shared.batches[batch][1]), HEADS)
        for tier in (0, 1):
            many = (*lead, 17 if batch == longer else 6)
            keep = torch.ones(many, dtype=torch.bool)
            shared.act(batch, "append", torch.full(lead, tier), keep, *shared.tokens(*many))
        if batch == longer:  # remove tokens of the last tier, leaving holes
            for _ in range(3):
                none, last = torch.full(lead, DROP), torch.full(lead, 1)
                shared.act(batch, "step", none, last, none, *shared.tokens(*lead))
    (mine, done), (other, more) = shared.batches
    mine.join(other)
    shared.batches = [(mine, [*done, *more])]
    shared.check_pages()
    shared.check_alike(0)
    for _ in range(9):
        shared.step()
        shared.check_pages()
    shared.check_alike(0)


def _pair() -> tuple[PagePool, Tiers, Tiers]:
    layout = PageLayout.sized(WIDE, 4)
    pool = PagePool(layout.nbytes, 8, grows=False)
    return pool, Tiers(pool, [layout], 1, 1, 2), Tiers(pool, [layout], 1, 1, 2)


def _fill(tiers: Tiers) -> None:
    table_rows = tiers.table_rows()
    key = torch.ones(len(table_rows), 5, DIM)
    tiers.append(0, table_rows, key, key, torch.ones(len(table_rows), 5, dtype=torch.bool))


def test_a_promise_does_not_cover_sequences_that_joined_after_it() -> None:
    layout = PageLayout.sized(WIDE, 4)
    pool = PagePool(layout.nbytes, 5, grows=False)
    mine, other = (Tiers(pool, [layout], 1, 1, 2) for _ in range(2))

    def step(tiers: Tiers) -> None:
        count = len(tiers.table_rows())
        kinds, key = torch.zeros(count, dtype=torch.uint8), torch.ones(count, DIM)
        place = torch.full((1, count), -1)
        tiers.step(kinds, kinds + NOBODY, kinds + DROP, place, key, key)

    key = torch.ones(2, 4, DIM)
    other.append(0, other.table_rows(), key, key, torch.ones(2, 4, dtype=torch.bool))
    step(mine)  # reserves two pages, for four steps
    mine.join(other)
    with pytest.raises(PoolExhausted, match="2 pages are needed and 1 are free"):
        step(mine)
    mine.check()


def test_what_has_joined_has_no_sequence_until_another_joins_it() -> None:
    pool, mine, other = _pair()
    _fill(other)
    mine.join(other)
    assert mine.counts().tolist() == [[[[0, 0], [5, 5]]]]
    assert (mine.pages_used, other.pages_used) == (4, 0)
    assert mine.stores[0].sequence_pages().tolist() == [0, 4]
    none = torch.zeros(0, 1, DIM)
    for refused in (
        lambda: other.append(
            0, other.table_rows(), none, none, torch.zeros(0, 1, dtype=torch.bool)
        ),
        lambda: other.truncate(torch.zeros(0, dtype=torch.long)),
        lambda: other.select(torch.tensor([0])),
    ):
        with pytest.raises(ValueError, match="no sequence is left here"):
            refused()
    other.join(mine)
    assert other.counts().tolist() == [[[[0, 0], [5, 5]]]]
    other.check()
    other.release()
    assert pool.free == pool.capacity


def test_tables_that_stay_where_they_are_take_sequences_in_and_let_them_go() -> None:
    """At both ends of the tables, from tables that are narrower or wider."""
    first = PageLayout.sized(WIDE, 4)
    layouts = [first, PageLayout.fitted(SMALL, first.nbytes)]
    pool = PagePool(first.nbytes, 200, grows=False)
    mine = Tiers(pool, layouts, 1, 3, 2)
    mine.fix(20)
    before = [x.data_ptr() for store in mine.stores for x in (store.table, store.length)]
    wanted: dict[int, list[torch.Tensor]] = {}
    for sequence, count in ((1, 5), (0, 9), (2, 1), (1, 7)):
        if sequence in wanted:
            mine.clear_in_place(torch.tensor([sequence]))
        other = Tiers(pool, layouts, 1, 1, 2)
        other.stores[0].widen(30 if count == 9 else 1)
        for tier in (0, 1):
            key = torch.randn(2, count, DIM)
            mark = torch.ones(2, count, dtype=torch.bool)
            other.append(tier, other.table_rows(), key, key, mark)
        wanted[sequence] = [store.read_layer(0, BOTH).key for store in other.stores]
        mine.adopt(sequence, other)
        assert other.pages_used == 0
        mine.check()
    mine.prepare(lambda: torch.tensor([True, False, True]), 3)
    for sequence, keys in wanted.items():
        for store, key in zip(mine.stores, keys, strict=True):
            rows = store.table_rows().view(3, 2)[sequence]
            found = store.read(rows, BOTH).key
            assert found is not None
            torch.testing.assert_close(found[:, : key.shape[1]], key)
    assert before == [x.data_ptr() for store in mine.stores for x in (store.table, store.length)]
    mine.clear_in_place(torch.tensor([0, 1, 2]))
    assert pool.free == pool.capacity


def test_a_row_that_outgrows_tables_that_stay_where_they_are_is_refused() -> None:
    pool, mine, other = _pair()
    mine.fix(4)
    _fill(other)
    mine.adopt(0, other)  # five tokens; a table of two pages has eight
    for _ in range(3):
        mine.prepare(lambda: torch.tensor([True]), 1)
        count = len(mine.table_rows())
        kinds, key = torch.zeros(count, dtype=torch.uint8), torch.ones(count, DIM)
        mine.step(kinds, kinds + NOBODY, kinds + DROP, torch.full((1, count), -1), key, key)
    with pytest.raises(ValueError, match="the fixed tables are too narrow"):
        mine.prepare(lambda: torch.tensor([True]), 1)
    assert pool.free == 4


def test_what_cannot_join_is_refused() -> None:
    pool, mine, _ = _pair()
    layout = PageLayout.sized(WIDE, 4)
    other = PageLayout.fitted(SMALL, layout.nbytes)
    with pytest.raises(ValueError, match="two pools"):
        mine.join(Tiers(PagePool(layout.nbytes), [layout], 1, 1, 2))
    with pytest.raises(ValueError, match="both sides need the same layout"):
        mine.join(Tiers(pool, [other], 1, 1, 2))
    with pytest.raises(ValueError, match="2 layers of 2 heads cannot join 1 layers of 2 heads"):
        mine.join(Tiers(pool, [layout], 2, 1, 2))
    with pytest.raises(ValueError, match="the same tiers"):
        mine.join(Tiers(pool, [layout, other], 1, 1, 2))
    with pytest.raises(ValueError, match="cannot join themselves"):
        mine.join(mine)
    kinds = [
        PerHeadRankTiers(pool, [[layout], [other]], torch.tensor([k]), 1) for k in ([0, 1], [1, 0])
    ]
    with pytest.raises(ValueError, match="PerHeadRankTiers cannot join Tiers"):
        mine.join(kinds[0])
    with pytest.raises(ValueError, match=r"kinds \[\[1, 0\]\] cannot join"):
        kinds[0].join(kinds[1])


def test_a_pool_over_memory_uses_it_and_no_other() -> None:
    memory = torch.full((6, 8), 7, dtype=torch.uint8)
    pool = PagePool.over(memory)
    assert (pool.capacity, pool.free, pool.least_free, pool.held_bytes) == (5, 5, 5, 40)
    assert pool.data.data_ptr() == pool.padded.data_ptr() == memory.data_ptr()
    assert (memory == 7).all()  # it is not cleared
    with pytest.raises(PoolExhausted):
        pool.allocate(6)
    with pytest.raises(PoolExhausted):
        pool.reserve(6)
    assert pool.allocate(5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="cannot shrink"):
        pool.shrink(torch.arange(5), 0)


@pytest.mark.parametrize(
    ("memory", "match"),
    [
        (torch.zeros(1, 8, dtype=torch.uint8), "with at least one page"),
        (torch.zeros(8, 4, dtype=torch.uint8).T, "must be contiguous"),
        (torch.zeros(1, 8, dtype=torch.uint8).expand(4, -1), "must be contiguous"),
    ],
)
def test_memory_that_cannot_hold_pages_is_refused(memory: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PagePool.over(memory)
