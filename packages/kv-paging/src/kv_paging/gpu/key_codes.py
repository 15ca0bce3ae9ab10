"""Codes of the keys in full pages (`kv_policy.key_codes`), in one launch over all table rows.

As in `bounding`, a program asks a table row for its pages that have no codes. It rotates some keys
of a page at a time, by 16 dimensions of the result.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_paging.gpu.bits import as_float, half_bits, store_bits
from kv_paging.gpu.bounding import PROGRAMS, bounds_at
from kv_paging.gpu.codes import clean, coded
from kv_paging.gpu.numbers import numbers_of
from kv_paging.gpu.reading import number_at, tier_of
from kv_paging.gpu.rows import page_at, stored
from kv_policy import PagedTokens
from kv_policy.key_codes import MOST_CODED_DIM, code_rotation
from kv_policy.launching import launching_on

ROWS = tl.constexpr(16)  # tokens of a tile, the fewest of a product
LINE = tl.constexpr(16)  # dimensions of a row of codes


@triton.jit
@no_type_check
def rotated(key, rotation, d, there, j, DIM: tl.constexpr):
    """Multiply keys [rows, K] by columns j of a rotation; row i of keys has dimensions d."""
    inside = there[:, None] & (j < DIM)[None, :]
    matrix = tl.load(rotation + d[:, None] * DIM + j[None, :], mask=inside, other=0.0)
    if key.shape[1] < 16:  # too few for a product of tiles
        return tl.sum(key[:, :, None] * matrix[None, :, :], 1)
    else:
        return tl.dot(key, matrix, input_precision="ieee")


@triton.jit
@no_type_check
def code_page(
    page, into, rotation, ALIGNED: tl.constexpr, LAYOUT: tl.constexpr, HOLES: tl.constexpr
):
    """Store the codes of the keys in a page, and their scales behind them."""
    TOKENS: tl.constexpr = LAYOUT[0]
    HALF: tl.constexpr = LAYOUT[5]
    DIM: tl.constexpr = HALF[1]
    LINES: tl.constexpr = (DIM + LINE - 1) // LINE
    if HALF[0] == 0:
        STRIDE: tl.constexpr = (DIM * HALF[2] + 7) // 8
        WIDE: tl.constexpr = triton.next_power_of_2(STRIDE)
        COUNT: tl.constexpr = 8 // HALF[2] * WIDE
        i = tl.arange(0, COUNT)
        d = i // WIDE * STRIDE + i % WIDE
        there = (i % WIDE < STRIDE) & (d < DIM)
    else:
        d = tl.arange(0, triton.next_power_of_2(DIM))
        there = d < DIM
    first = tl.full((), 0, tl.int32)  # a slot that is held, or TOKENS
    if HOLES:
        first += TOKENS
        for at in range(0, TOKENS, ROWS):
            row = at + tl.arange(0, ROWS)
            held = (row < TOKENS) & (number_at(page, row, row < TOKENS, LAYOUT[2], LAYOUT) >= 0)
            first = tl.minimum(first, tl.min(tl.where(held, row, TOKENS), 0))
    e = tl.arange(0, LINE)
    shift = 8 * (e % 4) + 2 * (e // 4)
    for at in range(0, TOKENS, ROWS):
        row = at + tl.arange(0, ROWS)
        some = row < TOKENS
        source = row
        if HOLES:
            held = some & (number_at(page, row, some, LAYOUT[2], LAYOUT) >= 0)
            source = tl.where(held, row, tl.minimum(first, TOKENS - 1))
        if HALF[0] == 0:
            key = tl.reshape(coded(page, source, some, HALF, LAYOUT[4]), (ROWS, COUNT))
        else:
            key = as_float(stored(page, source, some, HALF, LAYOUT[4]))
        key = tl.where(there[None, :] & some[:, None], clean(key), 0.0)
        square = tl.sum(key * key, 1)
        size = tl.sqrt(square / DIM)
        divisor = tl.where(size == 0, float("inf"), size)[:, None]
        product = tl.zeros([ROWS], tl.float32)
        for line in range(LINES):
            j = e + line * LINE
            x = rotated(key, rotation, d, there, j, DIM)
            code = tl.minimum(tl.maximum(tl.floor(x / divisor + 2.0), 0.0), 3.0)
            product += tl.sum(x * (2.0 * code - 3.0), 1)
            code = tl.where((j < DIM)[None, :], code, 0.0).to(tl.int32)
            word = tl.sum(code << shift[None, :], 1).to(tl.int32)
            store_bits(into + 4 * (line * TOKENS + row), word, some, 4, ALIGNED)
        scale = square / tl.where(product == 0, float("inf"), product)
        scale = tl.where(first < TOKENS, tl.minimum(scale, 65504.0), 0.0)
        store_bits(into + 4 * LINES * TOKENS + 2 * row, half_bits(scale), some, 2, True)


@triton.jit(
    do_not_specialize=["width", "columns", "step"],
    do_not_specialize_on_alignment=["table", "lengths", "count", "both", "rotation"],
)
@no_type_check
def code_kernel(
    data,
    pitch,
    table,
    width,
    lengths,
    count,
    both,
    rotation,
    columns,
    step,
    PAGED: tl.constexpr,
    BYTES: tl.constexpr,
    LAYOUT: tl.constexpr,
    HOLES: tl.constexpr,
):
    """Encode the keys of a table row's full pages from page `count` on, which its programs share.

    `both` are [table_rows, columns, BYTES], or, if PAGED, bytes of pages `step` * 16 apart.
    """
    r = tl.program_id(0)
    full = tl.minimum(tl.load(lengths + r) // LAYOUT[0], columns)
    first = tl.load(count + r).to(tl.int32) + tl.program_id(1)
    for column in range(first, full, tl.num_programs(1)):
        page = page_at(data, pitch, table, width, r, column, column >= 0, LAYOUT)
        into = bounds_at(both, table, width, r, column, columns, step, BYTES, 16, PAGED, LAYOUT)
        code_page(page, into, rotation, PAGED or BYTES % 4 == 0, LAYOUT, HOLES)


def encode(pages: PagedTokens, count: Tensor, codes: Tensor, most: int) -> None:
    """See `PageKernels.bound`, with codes; one launch."""
    layout, table_rows, paged = numbers_of(pages), len(count), codes.ndim == 2
    columns = pages.table.shape[2] if paged else codes.shape[1]
    assert layout[5][1] <= MOST_CODED_DIM, "the tiles of longer keys fill a program's memory"
    assert codes.dtype == torch.uint8
    assert not paged or codes.stride(0) % 16 == 0, "pages with codes are aligned"
    with launching_on(pages.data):
        code_kernel[(table_rows, max(1, min(most, PROGRAMS // table_rows)))](
            *tier_of(pages),
            count,
            codes,
            code_rotation(pages.layout.format.key.dim, pages.data.device),
            columns,
            codes.stride(0) // 16 if paged else 0,
            paged,
            codes.shape[-1],
            layout,
            pages.holes,
        )
