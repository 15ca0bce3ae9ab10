"""Rows, pages and prefix sums, compared with slices and loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_paging import moves
from kv_paging.moves import Segment, copy_pages, move, put, put_pages, take, take_pages
from kv_paging.table import PageTable, pages_for, spread
from kv_policy import PageLayout, RawCodec, TokenFormat

LAWS = settings(deadline=None, derandomize=True)


@LAWS
@given(
    offset=st.integers(0, 17),
    rows=st.integers(1, 9),
    width=st.integers(1, 33),
    slack=st.integers(0, 9),
    pages=st.integers(1, 4),
    data=st.data(),
)
def test_rows_at_any_offset_and_width(
    offset: int, rows: int, width: int, slack: int, pages: int, data: st.DataObject
) -> None:
    segment = Segment(offset, rows, width)
    memory = torch.randint(0, 256, (pages, offset + rows * width + slack), dtype=torch.uint8)
    places = data.draw(
        st.lists(
            st.tuples(st.integers(0, pages - 1), st.integers(0, rows - 1)), unique=True, max_size=9
        )
    )
    page = torch.tensor([p for p, _ in places], dtype=torch.long)
    row = torch.tensor([r for _, r in places], dtype=torch.long)
    want = [memory[p, offset + r * width : offset + (r + 1) * width].tolist() for p, r in places]
    assert take(memory, segment, page, row).tolist() == want

    new = torch.randint(0, 256, (len(places), width), dtype=torch.uint8)
    written = memory.clone()
    for i, (p, r) in enumerate(places):
        written[p, offset + r * width : offset + (r + 1) * width] = new[i]
    put(memory, segment, page, row, new)
    assert torch.equal(memory, written)

    chosen = torch.arange(pages).flip(0)[None]
    assert torch.equal(
        take_pages(memory, segment, chosen)[0].flatten(),
        memory[chosen[0], offset : offset + rows * width].flatten(),
    )
    whole = torch.randint(0, 256, (pages, rows, width), dtype=torch.uint8)
    written[:, offset : offset + rows * width] = whole.flatten(1)
    put_pages(memory, segment, torch.arange(pages), whole)
    assert torch.equal(memory, written)


def test_no_page_and_no_place_give_nothing() -> None:
    none = torch.zeros(0, dtype=torch.long)
    memory = torch.zeros(0, 12, dtype=torch.uint8)
    segment = Segment(0, 3, 4)
    assert take(memory, segment, none, none).shape == (0, 4)
    assert take_pages(memory, segment, none.view(2, 0)).shape == (2, 0, 4)
    assert take_pages(memory, segment, torch.zeros(2, 1, dtype=torch.long)).shape == (2, 3, 4)
    put(memory, segment, none, none, torch.zeros(0, 4, dtype=torch.uint8))
    put_pages(memory, segment, none, torch.zeros(0, 3, 4, dtype=torch.uint8))


@pytest.mark.parametrize("piece", [1, 20, 1 << 24])
def test_moving_takes_everything_along(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "_MOST_BYTES", piece)
    format = TokenFormat(RawCodec(3, torch.float32), RawCodec(1, torch.bfloat16))
    layout = PageLayout.sized(format, 2, scores=True, positions=True)
    memory = torch.arange(3 * layout.nbytes).to(torch.uint8).view(3, -1)
    before = memory.clone()
    source = (torch.tensor([2, 0]), torch.tensor([1, 0]))
    target = (torch.tensor([0, 1]), torch.tensor([1, 0]))
    move(memory, layout, source, target)
    for start, width in ((0, 12), (24, 2), (28, 4), (36, 4)):
        before[0, start + width : start + 2 * width] = before[2, start + width : start + 2 * width]
        before[1, start : start + width] = before[0, start : start + width]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("piece", [1, 1 << 24])
def test_copying_pages(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "_MOST_BYTES", piece)
    memory = torch.arange(25).to(torch.uint8).view(5, 5)
    copy_pages(memory, torch.tensor([0, 0, 3]), torch.tensor([1, 2, 4]))
    assert memory.tolist() == [[0, 1, 2, 3, 4]] * 3 + [[15, 16, 17, 18, 19]] * 2


@LAWS
@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=8),
)
def test_spread_lists_columns_row_by_row(rows: list[tuple[int, int]]) -> None:
    first = torch.tensor([f for f, _ in rows], dtype=torch.long)
    count = torch.tensor([c for _, c in rows], dtype=torch.long)
    row, column = spread(first, count, int(count.sum()))
    want = [(i, f + k) for i, (f, c) in enumerate(rows) for k in range(c)]
    assert list(zip(row.tolist(), column.tolist(), strict=True)) == want


def test_pages_for_rounds_up() -> None:
    assert pages_for(torch.tensor([0, 1, 7, 8, 14]), 7).tolist() == [0, 1, 1, 2, 2]
    assert pages_for(15, 7) == 3


def test_a_table_widens_rarely_and_keeps_what_it_has() -> None:
    table = PageTable(2, torch.device("cpu"))
    table.enter(torch.tensor([1]), torch.tensor([0]), torch.tensor([9]))
    widths = []
    for columns in range(1, 200):
        table.widen(columns)
        assert table.ids.shape[1] >= columns
        widths.append(table.ids.shape[1])
    assert len(set(widths)) < 45
    assert max(widths) < 200 * 9 / 8 + 1
    assert table.lookup(torch.tensor([1, 0]), torch.tensor([0, 0])).tolist() == [9, 0]
    assert table.nbytes == 4 * table.ids.numel()


def test_a_single_row_out_of_a_wider_tensor_is_put_like_any_other() -> None:
    data = torch.zeros(2, 64, dtype=torch.uint8)
    wide = torch.arange(36, dtype=torch.uint8)[None]
    segment = Segment(0, 2, 32)
    put(data, segment, torch.tensor([1]), torch.tensor([1]), wide[:, 4:])
    assert data[1, 32:].tolist() == wide[0, 4:].tolist()
