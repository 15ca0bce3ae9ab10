"""Bounds of the keys in full pages, in one launch over all table rows.

The host does not know which pages are full: a program asks a table row for its pages that have no
bounds, and mostly finds none.
"""

from typing import Final, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_paging.gpu.bits import as_float
from kv_paging.gpu.codes import coded
from kv_paging.gpu.numbers import numbers_of, rows
from kv_paging.gpu.reading import number_at, tier_of
from kv_paging.gpu.rows import entry_of, page_at, stored
from kv_policy import PagedTokens
from kv_policy.launching import launching_on

MOST: Final = (3.4028234663852886e38, 3.4028234663852886e38, 65504.0, 3.3895313892515355e38)
PROGRAMS: Final = 1 << 16  # of a launch: a program takes several pages of a row from there on


@triton.jit
@no_type_check
def upwards(x):
    """Return the bits of numbers, rounded to the next larger bfloat16; a cast may truncate."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC0, tl.where(bits < 0, bits, bits + 0xFFFF) >> 16)


@triton.jit
@no_type_check
def bound_page(
    page, into, LAYOUT: tl.constexpr, HOLES: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr
):
    """Store the largest numbers of the keys in a page, and the smallest behind them."""
    HALF: tl.constexpr = LAYOUT[5]
    DIM: tl.constexpr = HALF[1]
    if HALF[0] == 0:
        STRIDE: tl.constexpr = (DIM * HALF[2] + 7) // 8
        lane = tl.arange(0, triton.next_power_of_2(STRIDE))
        d = tl.arange(0, 8 // HALF[2])[:, None] * STRIDE + lane[None, :]
        there = (lane < STRIDE)[None, :] & (d < DIM)
    else:
        d = tl.arange(0, triton.next_power_of_2(DIM))
        there = d < DIM
    high = tl.full(d.shape, -MOST, tl.float32)
    low = tl.full(d.shape, MOST, tl.float32)
    strange = tl.zeros(d.shape, tl.int32)
    for first in range(0, LAYOUT[0], ROWS):
        row = first + tl.arange(0, ROWS)
        some = row < LAYOUT[0]
        if HOLES:
            some = some & (number_at(page, row, some, LAYOUT[2], LAYOUT) >= 0)
        if HALF[0] == 0:
            key = coded(page, row, some, HALF, LAYOUT[4])
            held = some[:, None, None]
        else:
            key = as_float(stored(page, row, some, HALF, LAYOUT[4]))
            held = some[:, None]
        high = tl.maximum(high, tl.max(tl.where(held, key, -MOST), 0))
        low = tl.minimum(low, tl.min(tl.where(held, key, MOST), 0))
        if HALF[0] != 0:  # a maximum may pass over what is not a number; codes stand for numbers
            strange = tl.maximum(strange, tl.max((held & (key != key)).to(tl.int32), 0))
    more, less = upwards(high), upwards(-low) ^ 0x8000
    if HALF[0] != 0:
        more, less = tl.where(strange > 0, 0x7FC0, more), tl.where(strange > 0, 0x7FC0, less)
    tl.store(into + d, more.to(tl.int16), there)
    tl.store(into + DIM + d, less.to(tl.int16), there)


@triton.jit
@no_type_check
def bounds_at(
    both,
    table,
    width,
    r,
    column,
    columns,
    step,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGED: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Return where the bounds of a page of table row r are.

    `both` are [table_rows, columns, SIZE], or, if PAGED, numbers of pages `step` * UNIT apart.
    """
    if PAGED:
        number = tl.load(entry_of(table, width, r, column, LAYOUT))
        return both + number.to(tl.int64) * step * UNIT
    else:
        return both + (r.to(tl.int64) * columns + column) * SIZE


@triton.jit(
    do_not_specialize=["width", "columns", "step"],
    do_not_specialize_on_alignment=["table", "lengths", "count", "both"],
)
@no_type_check
def bound_kernel(
    data,
    pitch,
    table,
    width,
    lengths,
    count,
    both,
    columns,
    step,
    PAGED: tl.constexpr,
    LAYOUT: tl.constexpr,
    HOLES: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Bound the full pages of a table row from page `count` on, which the programs of a row share.

    `both` are [table_rows, columns, 2 D], or, if PAGED, numbers of pages `step` * 8 apart.
    """
    r = tl.program_id(0)
    full = tl.minimum(tl.load(lengths + r) // LAYOUT[0], columns)
    first = tl.load(count + r).to(tl.int32) + tl.program_id(1)
    for column in range(first, full, tl.num_programs(1)):
        page = page_at(data, pitch, table, width, r, column, column >= 0, LAYOUT)
        into = bounds_at(
            both, table, width, r, column, columns, step, 2 * LAYOUT[5][1], 8, PAGED, LAYOUT
        )
        bound_page(page, into, LAYOUT, HOLES, MOST, ROWS)


def bound(pages: PagedTokens, count: Tensor, both: Tensor, most: int) -> None:
    """See `PageKernels.bound`; one launch."""
    layout, table_rows, paged = numbers_of(pages), len(count), both.ndim == 2
    columns = pages.table.shape[2] if paged else both.shape[1]
    assert not paged or both.stride(0) % 8 == 0, "pages with bounds are aligned"
    with launching_on(pages.data):
        bound_kernel[(table_rows, max(1, min(most, PROGRAMS // table_rows)))](
            *tier_of(pages),
            count,
            both.view(torch.int16),
            columns,
            both.stride(0) // 8 if paged else 0,
            paged,
            layout,
            pages.holes,
            MOST[layout[5][0]],
            rows(layout),
        )
