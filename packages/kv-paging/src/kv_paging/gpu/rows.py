"""Tokens in rows of pages: encoding, decoding and moving them, for all formats."""

from typing import no_type_check

import triton
import triton.language as tl

from kv_paging.gpu.bits import as_float, from_bits, load_bits, number_bits, store_bits
from kv_paging.gpu.codes import decode_codes, encode_codes


@triton.jit
@no_type_check
def stride_at(strides, i: tl.constexpr, HALF: tl.constexpr):
    """Return a stride of vectors, from `kv_policy.launching.strides_of`."""
    if HALF[1] % 16:
        return strides[i] // 16
    else:
        return strides[i]


@triton.jit
@no_type_check
def entry_of(table, width, table_row, column, LAYOUT: tl.constexpr):
    """Return the address of a table row's page id; columns may be counted from the right."""
    row = table + table_row.to(tl.int64) * width
    if LAYOUT[3]:
        return row + (width - 1 - column)
    else:
        return row + column


@triton.jit
@no_type_check
def page_at(data, pitch, table, width, table_row, column, some, LAYOUT: tl.constexpr):
    """Return the addresses of the marked table rows' pages."""
    page = tl.load(entry_of(table, width, table_row, column, LAYOUT), some, other=0)
    return data + page.to(tl.int64) * pitch


@triton.jit
@no_type_check
def encode(
    page, row, some, x, first, step, HALF: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr
):
    """Encode a vector per marked token, elements at x + first + d * step, to its page's row."""
    KIND: tl.constexpr = HALF[0]
    if KIND == 0:
        encode_codes(page, row, some, x, first, step, HALF, ALIGN, ROWS)
    else:
        DIM: tl.constexpr = HALF[1]
        SIZE: tl.constexpr = 4 if KIND == 1 else 2
        d = tl.arange(0, triton.next_power_of_2(DIM))
        marked = some[:, None] & (d < DIM)[None, :]
        numbers = tl.load((x + first)[:, None] + d[None, :] * step, marked, other=0.0)
        place = (page + HALF[4] + row * (SIZE * DIM))[:, None] + SIZE * d[None, :]
        aligned: tl.constexpr = (ALIGN % SIZE == 0) and (HALF[4] % SIZE == 0)
        store_bits(place, number_bits(numbers, KIND), marked, SIZE, aligned)


@triton.jit
@no_type_check
def stored(page, row, some, HALF: tl.constexpr, ALIGN: tl.constexpr):
    """Return the vectors of the marked tokens, plain numbers, in their dtype."""
    KIND: tl.constexpr = HALF[0]
    DIM: tl.constexpr = HALF[1]
    SIZE: tl.constexpr = 4 if KIND == 1 else 2
    d = tl.arange(0, triton.next_power_of_2(DIM))
    place = (page + HALF[4] + row * (SIZE * DIM))[:, None] + SIZE * d[None, :]
    aligned: tl.constexpr = (ALIGN % SIZE == 0) and (HALF[4] % SIZE == 0)
    return from_bits(load_bits(place, some[:, None] & (d < DIM)[None, :], SIZE, aligned), KIND)


@triton.jit
@no_type_check
def decode(page, row, some, out, first, real, HALF: tl.constexpr, ALIGN: tl.constexpr):
    """Decode a vector per token to out + first + d; zeros if real but not marked."""
    if HALF[0] == 0:
        decode_codes(page, row, some, out, first, real, HALF, ALIGN)
    else:
        DIM: tl.constexpr = HALF[1]
        d = tl.arange(0, triton.next_power_of_2(DIM))
        numbers = stored(page, row, some, HALF, ALIGN)
        target = (out + first)[:, None] + d[None, :]
        there = real[:, None] & (d < DIM)[None, :]
        if out.dtype.element_ty == numbers.dtype:
            tl.store(target, numbers, there)
        else:
            tl.store(target, as_float(numbers), there)


@triton.jit
@no_type_check
def beside(page, row, OFFSET: tl.constexpr):
    """Return the addresses of the scores, or the positions, of tokens."""
    return page + OFFSET + row * 4


@triton.jit
@no_type_check
def put(
    page,
    row,
    some,
    key,
    key_first,
    key_step,
    value,
    value_first,
    value_step,
    score,
    position,
    index,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Encode the marked tokens into rows of their pages.

    Scores and positions, at `index`, are read if pages store them.
    """
    ALIGN: tl.constexpr = LAYOUT[4]
    encode(page, row, some, key, key_first, key_step, LAYOUT[5], ALIGN, ROWS)
    encode(page, row, some, value, value_first, value_step, LAYOUT[6], ALIGN, ROWS)
    if LAYOUT[1] >= 0:
        bits = tl.load(score + index, some, other=0).to(tl.int32, bitcast=True)
        aligned: tl.constexpr = (ALIGN % 4 == 0) and (LAYOUT[1] % 4 == 0)
        store_bits(beside(page, row, LAYOUT[1]), bits, some, 4, aligned)
    if LAYOUT[2] >= 0:
        number = tl.load(position + index, some, other=0).to(tl.int32)
        aligned_too: tl.constexpr = (ALIGN % 4 == 0) and (LAYOUT[2] % 4 == 0)
        store_bits(beside(page, row, LAYOUT[2]), number, some, 4, aligned_too)


@triton.jit
@no_type_check
def move_segment(
    source,
    source_row,
    target,
    target_row,
    some,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy a row of `WIDTH` bytes per marked token, in the widest possible units."""
    FOURS: tl.constexpr = (ALIGN % 4 == 0) and (OFFSET % 4 == 0) and (WIDTH % 4 == 0)
    TWOS: tl.constexpr = (ALIGN % 2 == 0) and (OFFSET % 2 == 0) and (WIDTH % 2 == 0)
    UNIT: tl.constexpr = 4 if FOURS else (2 if TWOS else 1)
    unit = tl.arange(0, triton.next_power_of_2(WIDTH // UNIT))
    marked = some[:, None] & (unit < WIDTH // UNIT)[None, :]
    of = (source + OFFSET + source_row * WIDTH)[:, None] + UNIT * unit[None, :]
    to = (target + OFFSET + target_row * WIDTH)[:, None] + UNIT * unit[None, :]
    store_bits(to, load_bits(of, marked, UNIT, True), marked, UNIT, True)


@triton.jit
@no_type_check
def move_half(
    source, source_row, target, target_row, some, HALF: tl.constexpr, ALIGN: tl.constexpr
):
    """Copy a key, or a value, of each marked token in its stored form."""
    KIND: tl.constexpr = HALF[0]
    DIM: tl.constexpr = HALF[1]
    if KIND == 0:
        codes: tl.constexpr = (DIM * HALF[2] + 7) // 8
        meta: tl.constexpr = 4 * ((DIM + HALF[3] - 1) // HALF[3])
        move_segment(source, source_row, target, target_row, some, HALF[4], codes, ALIGN)
        move_segment(source, source_row, target, target_row, some, HALF[5], meta, ALIGN)
    else:
        wide: tl.constexpr = (4 if KIND == 1 else 2) * DIM
        move_segment(source, source_row, target, target_row, some, HALF[4], wide, ALIGN)


@triton.jit
@no_type_check
def move(source, source_row, target, target_row, some, LAYOUT: tl.constexpr):
    """Copy all data of each marked token from a row of one page to a row of another."""
    ALIGN: tl.constexpr = LAYOUT[4]
    move_half(source, source_row, target, target_row, some, LAYOUT[5], ALIGN)
    move_half(source, source_row, target, target_row, some, LAYOUT[6], ALIGN)
    if LAYOUT[1] >= 0:
        move_segment(source, source_row, target, target_row, some, LAYOUT[1], 4, ALIGN)
    if LAYOUT[2] >= 0:
        move_segment(source, source_row, target, target_row, some, LAYOUT[2], 4, ALIGN)
