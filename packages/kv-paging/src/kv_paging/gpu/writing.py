"""New tokens: encoded and written to their slots in one launch, for any number of kept tokens."""

from typing import Final, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_paging.gpu.numbers import alignment, blocks, numbers, numbers_of, rows
from kv_paging.gpu.rows import page_at, put, stride_at
from kv_paging.work import TokenWrite
from kv_policy import PagedTokens, PageLayout
from kv_policy.launching import launching_on, strides_of

SCAN: Final = 1024  # marks per iteration of the sum


@triton.jit
@no_type_check
def total(numbers, end, MANY: tl.constexpr):
    """Sum the first `end` numbers, `MANY` at a time, for the offset of a program's tokens."""
    found = tl.zeros((MANY,), tl.int32)
    for first in range(0, end, MANY):
        i = first + tl.arange(0, MANY)
        found += tl.load(numbers + i, i < end, other=0).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit(
    do_not_specialize=["width", "length", "count"],
    do_not_specialize_on_alignment=["table", "table_rows", "start", "keep", "score", "position"],
)
@no_type_check
def write_kernel(
    data,
    pitch,
    table,
    width,
    table_rows,
    start,
    keep,
    length,
    key,
    key_strides,
    value,
    value_strides,
    score,
    position,
    count,
    LAYOUT: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write the kept tokens among `COLUMNS` of some table rows; earlier marks give their slots."""
    tokens: tl.constexpr = LAYOUT[0]
    ROWS: tl.constexpr = TABLE_ROWS * COLUMNS
    flat = tl.arange(0, ROWS)
    which = (tl.program_id(0) * TABLE_ROWS + flat // COLUMNS).to(tl.int64)
    begin = tl.program_id(1) * COLUMNS
    i = begin + flat % COLUMNS
    here = which < count
    some = here & (tl.load(keep + which * length + i, here & (i < length), other=0) != 0)
    rank = tl.reshape(tl.cumsum(tl.reshape(some.to(tl.int32), (TABLE_ROWS, COLUMNS)), 1), (ROWS,))
    slot = tl.load(start + which, here, other=0) + rank - 1
    if TABLE_ROWS == 1:  # with more table rows, these are all tokens of each
        slot += total(keep + tl.program_id(0).to(tl.int64) * length, begin, MANY)
    table_row = tl.load(table_rows + which, here, other=0)
    page = page_at(data, pitch, table, width, table_row, slot // tokens, some, LAYOUT)
    wide = i.to(tl.int64)
    put(
        page,
        slot % tokens,
        some,
        key,
        which * stride_at(key_strides, 0, LAYOUT[5]) + wide * stride_at(key_strides, 1, LAYOUT[5]),
        key_strides[2],
        value,
        which * stride_at(value_strides, 0, LAYOUT[6])
        + wide * stride_at(value_strides, 1, LAYOUT[6]),
        value_strides[2],
        score,
        position,
        which * length + i,
        LAYOUT,
        ROWS,
    )


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["page", "row"])
@no_type_check
def place_kernel(
    data,
    pitch,
    page,
    row,
    count,
    key,
    key_strides,
    value,
    value_strides,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write `ROWS` tokens, each to its row of its page."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    some = i < count
    place = data + tl.load(page + i, some, other=0).to(tl.int64) * pitch
    wide = i.to(tl.int64)
    put(
        place,
        tl.load(row + i, some, other=0),
        some,
        key,
        wide * stride_at(key_strides, 0, LAYOUT[5]),
        key_strides[1],
        value,
        wide * stride_at(value_strides, 0, LAYOUT[6]),
        value_strides[1],
        None,
        None,
        i,
        LAYOUT,
        ROWS,
    )


def write(pages: PagedTokens, tokens: TokenWrite) -> None:
    """See `PageKernels.write`; one launch."""
    layout, (count, length) = numbers_of(pages), tokens.keep.shape
    columns = 1 if length == 1 else rows(layout)  # two kernels: of steps, and of prompts
    together = rows(layout) // columns
    with launching_on(pages.data):
        write_kernel[blocks(count, together), blocks(length, columns)](
            pages.data,
            pages.data.stride(0),
            table_of(pages),
            pages.table.shape[-1],
            tokens.table_rows.contiguous(),
            tokens.start.contiguous(),
            tokens.keep.contiguous().view(torch.uint8),
            length,
            tokens.key.detach(),
            strides_of(tokens.key),
            tokens.value.detach(),
            strides_of(tokens.value),
            scores(tokens.score),
            positions(tokens.position),
            count,
            layout,
            together,
            columns,
            SCAN,
        )


def place(
    data: Tensor, layout: PageLayout, page: Tensor, row: Tensor, key: Tensor, value: Tensor
) -> None:
    """See `PageKernels.place`; one launch."""
    known = numbers(layout, False, alignment(data))
    size = rows(known)
    bare = (known[0], -1, -1, *known[3:])  # without scores and positions
    key, value = (x[: len(page) // x.shape[1]].flatten(0, 1) for x in (key, value))
    with launching_on(data):
        place_kernel[(blocks(len(page), size),)](
            data,
            data.stride(0),
            page.contiguous(),
            row.contiguous(),
            len(page),
            key.detach(),
            strides_of(key),
            value.detach(),
            strides_of(value),
            bare,
            size,
        )


def table_of(pages: PagedTokens) -> Tensor:
    """Return the page ids of a tier, with contiguous columns."""
    return pages.table[:, 0].contiguous()


def scores(score: Tensor | None) -> Tensor | None:
    """Return scores in their stored dtype."""
    return None if score is None else score.detach().to(torch.float32).contiguous()


def positions(position: Tensor | None) -> Tensor | None:
    """Return positions as 32-bit or 64-bit integers."""
    if position is None:
        return None
    wide = position.dtype in (torch.int32, torch.int64)
    return (position if wide else position.long()).contiguous()
