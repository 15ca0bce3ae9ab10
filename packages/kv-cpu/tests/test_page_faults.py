"""Invalid tables and arguments raise and change nothing, and no write ever leaves the pool."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cpu import pages as native
from kv_cpu.pages import declined
from kv_paging import DecodeStep, NewTokens, PagePool, Placement, TokenWrite, select_page_kernels
from kv_paging.kernels import declined as declined_by
from kv_policy import PagedTokens, PageLayout, RawCodec, RunningMean, RunningSum, TokenFormat
from kv_quant import ChannelCodec, IntegerCodec, RowsCodec

FORM = TokenFormat(IntegerCodec(5, 4), RawCodec(3, torch.float16))
LAYOUT = PageLayout.sized(FORM, 3, True, True)
PAGES, TABLE_ROWS, COLUMNS = 6, 3, 2
ROOM = LAYOUT.tokens * COLUMNS


class Pool(PagePool):
    """A pool in the middle of memory that must not change."""

    def __init__(self) -> None:
        super().__init__(LAYOUT.nbytes, PAGES, grows=False)
        self.memory = torch.full((PAGES + 21, LAYOUT.nbytes), 0xA5, dtype=torch.uint8)
        self._data = self.memory[10 : PAGES + 11]
        self._data.random_(generator=torch.Generator().manual_seed(0))

    def outside(self) -> torch.Tensor:
        return torch.cat((self.memory[:10], self.memory[PAGES + 10 :][1:]))


def tier(pool: Pool, table: torch.Tensor, length: torch.Tensor, reverse: bool) -> PagedTokens:
    return PagedTokens(pool.padded, table[:, None], length[:, None], LAYOUT, reverse)


def some(data: st.DataObject, low: int, high: int, *shape: int) -> torch.Tensor:
    """Draw numbers that are mostly valid, and sometimes not."""
    count = int(torch.tensor(shape).prod())
    wild = st.sampled_from([-(2**31), -1, high, high + 1, 2**31 - 1])
    good = st.integers(low, high - 1)
    odd = data.draw(st.booleans())
    number = st.one_of(*[good] * 9, wild) if odd else good
    return torch.tensor(data.draw(st.lists(number, min_size=count, max_size=count))).view(shape)


def tried(pool: Pool, changed: list[torch.Tensor], do: Callable[[], object]) -> None:
    """Check that a call succeeds or changes nothing, and changes nothing outside of the pool."""
    watched = [pool.memory, *changed]
    before, outside = [x.clone() for x in watched], pool.outside()
    try:
        do()
    except RuntimeError:
        assert all(torch.equal(a, b) for a, b in zip(before, watched, strict=True))
    assert torch.equal(pool.outside(), outside)
    assert torch.equal(pool.padded[-1], before[0][PAGES + 10])  # nor is the scratch page


FUZZ = settings(max_examples=60, deadline=None, derandomize=True)


@FUZZ
@given(st.data(), st.booleans())
def test_whatever_tables_and_table_rows_say(isa, data, reverse):
    pool = Pool()
    table = some(data, 0, PAGES, TABLE_ROWS, COLUMNS).int()
    length = some(data, 0, ROOM + 1, TABLE_ROWS).int()
    table_rows = some(data, 0, TABLE_ROWS, 2)
    held = tier(pool, table, length, reverse)
    start = some(data, 0, 3, 2)
    keep = some(data, 0, 1, 2, 5).bool().logical_not()
    x, y = torch.randn(2, 5, 5), torch.randn(2, 5, 3)
    score, place = torch.randn(2, 5), torch.arange(10).view(2, 5)
    slots = data.draw(st.integers(0, ROOM))
    tried(
        pool,
        [],
        lambda: native.write(held, TokenWrite(table_rows, start, keep, x, y, score, place)),
    )
    tried(pool, [], lambda: native.compact(held, table_rows, keep))
    tried(pool, [], lambda: native.rescore(held, table_rows, score))
    seen, number = torch.ones(2, 5, dtype=torch.long), data.draw(st.integers(1, 9))
    given = (held, table_rows, start - 1, score.abs(), seen)
    for running in (RunningMean(number - 1), RunningSum(number)):
        tried(pool, [], lambda running=running: native.accumulate(*given, running))
    tried(pool, [], lambda: native.read(held, table_rows, slots, frozenset({"keys", "values"})))
    tried(pool, [], lambda: native.weakest(held, table_rows, slots, start))
    source, target = some(data, 0, PAGES, 3), some(data, 0, PAGES, 3)
    tried(pool, [], lambda: native.copy_pages(pool.data, source, target))


@FUZZ
@given(st.data())
def test_whatever_a_step_is_told(isa, data):
    pool = Pool()
    pool.ring.ids.copy_(some(data, 0, PAGES, PAGES + 1))
    pool.ring.start.copy_(some(data, 0, PAGES))
    pool.ring.count.copy_(some(data, 0, PAGES + 1))
    tables = [some(data, 0, PAGES, TABLE_ROWS, COLUMNS).int() for _ in range(2)]
    lengths = [some(data, 0, ROOM, TABLE_ROWS).int() for _ in range(2)]
    members = tuple(
        tier(pool, table, length, reverse)
        for table, length, reverse in zip(tables, lengths, (False, True), strict=True)
    )
    kinds = [
        torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))) for _ in "123"
    ]
    work = DecodeStep(
        members,
        Placement(*(kind.to(torch.uint8) for kind in kinds)),
        some(data, -1, ROOM, 2, TABLE_ROWS),
        NewTokens(torch.randn(3, 5), torch.randn(3, 3), torch.randn(3), torch.arange(3)),
    )
    ring = [pool.ring.ids, pool.ring.start, pool.ring.count]
    tried(pool, [*tables, *lengths, *ring], lambda: native.step(pool, [work]))


def test_faults_are_named(isa):
    pool = Pool()
    table = torch.zeros(TABLE_ROWS, COLUMNS, dtype=torch.int32)
    held = tier(pool, table, torch.tensor([2, 2, 2]).int(), False)
    one, keep = torch.tensor([1]), torch.ones(1, 2, dtype=torch.bool)
    x = (torch.zeros(1, 2, 5), torch.zeros(1, 2, 3))
    beside = (torch.zeros(1, 2), torch.zeros(1, 2).int())
    table[1, 1] = PAGES  # the scratch page

    def write(row, slot):
        native.write(held, TokenWrite(row, torch.tensor([slot]), keep, *x, *beside))

    write(one, 1)
    with pytest.raises(RuntimeError, match="a table names page 6; its pool has 6 pages"):
        write(one, 2)
    with pytest.raises(RuntimeError, match="slots 5 to 6; its table covers 0 to 5"):
        write(one, 5)
    with pytest.raises(RuntimeError, match="table row 3 does not exist; there are 3"):
        write(torch.tensor([3]), 0)
    with pytest.raises(RuntimeError, match="page 7 is to be copied to page 0; there are 6"):
        native.copy_pages(pool.data, torch.tensor([7]), torch.tensor([0]))


@pytest.mark.parametrize("times", [7, 600])  # pages of the pool for each that is copied
@pytest.mark.parametrize("count", [1, 255, 256, 257, 3000])
def test_pages_that_are_copied_are_told_apart_however_many_there_are(count, times):
    data = torch.arange(times * count).to(torch.uint8).view(-1, 1).repeat(1, 3)
    before = data.clone()
    some = torch.randperm(times * count, generator=torch.Generator().manual_seed(count))
    source, target = some[:count], some[count : 2 * count]
    native.copy_pages(data, source, target)
    assert torch.equal(data[target], before[source])
    if count == 1:
        return
    with pytest.raises(RuntimeError, match=f"page {target[0]} is written twice"):
        native.copy_pages(data, source, torch.cat((target[:-1], target[:1])))
    with pytest.raises(RuntimeError, match=f"page {target[3]} is read and written"):
        native.copy_pages(data, torch.cat((source[:-1], target[3:4])), target)


def test_what_is_declined_goes_to_torch_with_a_reason():
    cpu = torch.device("cpu")

    def reason(codec: object, device: torch.device = cpu) -> str:
        layout = PageLayout.sized(TokenFormat(codec, codec), 4)
        found = declined(layout, device)
        assert declined_by("cpu", layout, device) == found
        assert select_page_kernels(layout, device).__name__ == "kv_paging.torch_kernels"
        assert select_page_kernels(layout, device, "cpu").__name__ == "kv_paging.torch_kernels"
        return found

    assert "its own code" in reason(ChannelCodec(4, 2, 4))
    assert "its own code" in reason(RowsCodec(IntegerCodec(4, 2), 4))
    assert "its own code" in reason(RawCodec(4, torch.float64))
    assert reason(RawCodec(1025, torch.float32)) == "vectors of more than 1024 dimensions"
    assert reason(RawCodec(4, torch.float32), torch.device("meta")) == "pages on meta"
    assert declined_by("torch", LAYOUT, cpu) is None
    assert (
        select_page_kernels(LAYOUT, cpu).__name__
        == select_page_kernels(LAYOUT, cpu, "cpu").__name__
        == "kv_cpu.pages"
    )
    assert select_page_kernels(LAYOUT, cpu, "torch").__name__ == "kv_paging.torch_kernels"
