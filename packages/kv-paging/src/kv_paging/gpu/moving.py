"""Copies of bytes between pages: filling gaps, and copying whole pages."""

from typing import Final, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_paging.gpu.bits import load_bits, store_bits
from kv_paging.gpu.numbers import alignment, blocks, numbers_of, rows
from kv_paging.gpu.rows import move, page_at
from kv_paging.gpu.writing import SCAN, table_of, total
from kv_policy import PagedTokens
from kv_policy.launching import launching_on

_BYTES: Final = 4096  # of a page, copied per program


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["stay"])
@no_type_check
def gaps_kernel(stay, length, gaps, MANY: tl.constexpr):
    """List the gaps before a table row's new end, in order."""
    which = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * MANY
    marks = stay + which * length
    end = total(marks, length, MANY)
    i = begin + tl.arange(0, MANY)
    kept = (tl.load(marks + i, i < length, other=0) != 0).to(tl.int32)
    rank = i - total(marks, begin, MANY) - tl.cumsum(kept, 0)
    tl.store(gaps + which * length + rank, i, (kept == 0) & (i < end))


@triton.jit(
    do_not_specialize=["width", "length"],
    do_not_specialize_on_alignment=["table", "table_rows", "stay"],
)
@no_type_check
def compact_kernel(
    data,
    pitch,
    table,
    width,
    table_rows,
    stay,
    length,
    gaps,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Move the kept tokens past a table row's new end into the gaps, in order."""
    tokens: tl.constexpr = LAYOUT[0]
    which = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * ROWS
    marks = stay + which * length
    end = total(marks, length, MANY)
    if begin + ROWS > end:
        i = begin + tl.arange(0, ROWS)
        kept = (tl.load(marks + i, i < length, other=0) != 0).to(tl.int32)
        some = (kept != 0) & (i >= end)
        before = total(marks, begin, MANY) - total(marks, end, MANY)
        rank = before + tl.cumsum(kept, 0) - 1
        gap = tl.load(gaps + which * length + rank, some, other=0)
        table_row = tl.load(table_rows + which)
        source = page_at(data, pitch, table, width, table_row, i // tokens, some, LAYOUT)
        target = page_at(data, pitch, table, width, table_row, gap // tokens, some, LAYOUT)
        move(source, i % tokens, target, gap % tokens, some, LAYOUT)


@triton.jit(do_not_specialize_on_alignment=["source", "target"])
@no_type_check
def copy_kernel(data, pitch, source, target, nbytes, UNIT: tl.constexpr, MANY: tl.constexpr):
    """Copy a part of a page."""
    which = tl.program_id(0)
    unit = tl.program_id(1) * MANY + tl.arange(0, MANY)
    some = unit * UNIT < nbytes
    of = data + tl.load(source + which).to(tl.int64) * pitch
    to = data + tl.load(target + which).to(tl.int64) * pitch
    bits = load_bits(of + unit * UNIT, some, UNIT, True)
    store_bits(to + unit * UNIT, bits, some, UNIT, True)


def compact(pages: PagedTokens, table_rows: Tensor, stay: Tensor) -> None:
    """See `PageKernels.compact`; two launches."""
    layout, (count, length) = numbers_of(pages), stay.shape
    size = rows(layout)
    marks = stay.contiguous().view(torch.uint8)
    gaps = torch.empty(count, length, dtype=torch.int32, device=stay.device)
    with launching_on(pages.data):
        gaps_kernel[count, blocks(length, SCAN)](marks, length, gaps, SCAN)
        compact_kernel[count, blocks(length, size)](
            pages.data,
            pages.data.stride(0),
            table_of(pages),
            pages.table.shape[-1],
            table_rows.contiguous(),
            marks,
            length,
            gaps,
            layout,
            size,
            SCAN,
        )


def copy_pages(data: Tensor, source: Tensor, target: Tensor) -> None:
    """See `PageKernels.copy_pages`; one launch."""
    nbytes = data.shape[1]
    unit = 4 if alignment(data) % 4 == 0 and nbytes % 4 == 0 else 1
    many = _BYTES // unit
    with launching_on(data):
        copy_kernel[len(source), blocks(nbytes, _BYTES)](
            data, data.stride(0), source.contiguous(), target.contiguous(), nbytes, unit, many
        )
