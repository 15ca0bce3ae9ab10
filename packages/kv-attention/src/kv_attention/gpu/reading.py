"""Loading tiles of stored vectors without dequantizing codes; masked slots read as zero.

A tile is [BLOCK, PADDED]: slots of a row, and dimensions padded to a power of two. Integer codes
are not shifted down to their values. The code of dimension d is at bit `shift(d)` of its byte, so
the masked byte is code * 2**shift(d), exact in float16; the factor 2**-shift(d) is applied once to
the query or the output. A scale and a zero point per vector are applied outside the products, too.

A FORM describes a vector and its offsets in a page, from `kv_policy.described`: number kind (0:
codes, 1 to 3: float32, float16 and bfloat16), dimensions, bits, dimensions that share a scale, and
the byte offsets of codes or numbers and of metadata. ALIGN divides all addresses of fields.
"""

from typing import no_type_check

import triton
import triton.language as tl

# Widen four masked bytes to four float16: 0x6400 + b encodes 1024 + b; subtract 1024.
WIDEN = tl.constexpr(
    """{
    .reg .b32 kept, offset;
    and.b32 kept, $2, $3;
    mov.b32 offset, 0x64006400;
    prmt.b32 $0, kept, 0x64646464, 0x4140;
    prmt.b32 $1, kept, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, offset;
    sub.f16x2 $1, $1, offset;
    }"""
)


@triton.jit
@no_type_check
def shift_of(d, FORM: tl.constexpr):
    """Return the bit offset of the code of each dimension; 0 for plain numbers and padding."""
    if FORM[0] == 0:
        BYTES: tl.constexpr = (FORM[1] * FORM[2] + 7) // 8
        return tl.where(d < FORM[1], d // BYTES * FORM[2], 0)
    return tl.zeros_like(d)


@triton.jit
@no_type_check
def unshift(d, FORM: tl.constexpr):
    """Return 2**-shift of each dimension, float32."""
    return ((127 - shift_of(d, FORM)) << 23).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def word16(data, stride, page, at, there, ALIGN: tl.constexpr):
    """Load two bytes from byte `at` of pages, as uint16; 0 if masked."""
    if ALIGN % 2 == 0:
        halves = data.to(tl.pointer_type(tl.uint16))
        return tl.load(halves + (page * (stride // 2) + at // 2), mask=there, other=0)
    here = data + (page * stride + at)
    low = tl.load(here, mask=there, other=0).to(tl.uint16)
    return low | (tl.load(here + 1, mask=there, other=0).to(tl.uint16) << 8)


@triton.jit
@no_type_check
def word32(data, stride, page, at, there, ALIGN: tl.constexpr):
    """Load four bytes from byte `at` of pages, as uint32; 0 if masked."""
    if ALIGN % 4 == 0:
        words = data.to(tl.pointer_type(tl.uint32))
        return tl.load(words + (page * (stride // 4) + at // 4), mask=there, other=0)
    low = word16(data, stride, page, at, there, ALIGN).to(tl.uint32)
    return low | (word16(data, stride, page, at + 2, there, ALIGN).to(tl.uint32) << 16)


@triton.jit
@no_type_check
def codes_tile(
    data, stride, page, row, held, d, FORM: tl.constexpr, AS: tl.constexpr, ASM: tl.constexpr
):
    """Load codes times 2**shift, in the type AS."""
    BYTES: tl.constexpr = (FORM[1] * FORM[2] + 7) // 8
    start = page * stride + (FORM[4] + row * BYTES)
    there = held[:, None] & (d < FORM[1])[None, :]
    raw = tl.load(data + (start[:, None] + (d % BYTES)[None, :]), mask=there, other=0)
    mask = ((2 ** FORM[2] - 1) << shift_of(d, FORM)).to(tl.uint8)[None, :]
    if ASM and tl.float16 == AS:
        return tl.inline_asm_elementwise(
            WIDEN, "=r,=r,r,r", [raw, mask], dtype=tl.float16, is_pure=True, pack=4
        )
    return (raw & mask).to(AS)


@triton.jit
@no_type_check
def meta_of(data, stride, page, row, there, group, FORM: tl.constexpr, ALIGN: tl.constexpr):
    """Load the scale and zero point of a group of a vector, in float32; 0 if masked."""
    GROUPS: tl.constexpr = (FORM[1] + FORM[3] - 1) // FORM[3]
    at = FORM[5] + row * (4 * GROUPS) + 2 * group
    if GROUPS == 1 and ALIGN % 4 == 0:
        both = word32(data, stride, page, at, there, ALIGN)
        low, high = (both & 0xFFFF).to(tl.uint16), (both >> 16).to(tl.uint16)
    else:
        low = word16(data, stride, page, at, there, ALIGN)
        high = word16(data, stride, page, at + 2 * GROUPS, there, ALIGN)
    scale, zero = low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
@no_type_check
def raw_tile(data, stride, page, row, held, d, FORM: tl.constexpr, ALIGN: tl.constexpr):
    """Load plain numbers, in their stored type."""
    SIZE: tl.constexpr = 4 if FORM[0] == 1 else 2
    WORD: tl.constexpr = tl.uint32 if SIZE == 4 else tl.uint16
    there = held[:, None] & (d < FORM[1])[None, :]
    if ALIGN % SIZE == 0:
        start = page * (stride // SIZE) + (FORM[4] // SIZE + row * FORM[1])
        words = data.to(tl.pointer_type(WORD)) + (start[:, None] + d[None, :])
        bits = tl.load(words, mask=there, other=0)
    else:
        at = FORM[4] + SIZE * (row[:, None] * FORM[1] + d[None, :])
        if SIZE == 4:
            bits = word32(data, stride, page[:, None], at, there, ALIGN)
        else:
            bits = word16(data, stride, page[:, None], at, there, ALIGN)
    # A single return: the compiler compares the types of all returns, even of untaken branches.
    if FORM[0] == 1:
        numbers = bits.to(tl.float32, bitcast=True)
    elif FORM[0] == 2:
        numbers = bits.to(tl.float16, bitcast=True)
    else:
        numbers = bits.to(tl.bfloat16, bitcast=True)
    return numbers


@triton.jit
@no_type_check
def paged_tile(
    data,
    stride,
    page,
    row,
    held,
    d,
    FORM: tl.constexpr,
    ALIGN: tl.constexpr,
    AS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load a tile in the type AS, with each slot's scale and zero point still to be applied.

    If a vector has several scales, all of them are applied here; 2**-shift is not.
    """
    one = tl.full(row.shape, 1.0, tl.float32)
    if FORM[0] == 0:
        tile = codes_tile(data, stride, page, row, held, d, FORM, AS, ASM)
        if FORM[3] >= FORM[1]:
            scale, zero = meta_of(data, stride, page, row, held, 0, FORM, ALIGN)
        else:
            there = held[:, None] & (d < FORM[1])[None, :]
            group, each = (d // FORM[3])[None, :], page[:, None]
            wide, least = meta_of(data, stride, each, row[:, None], there, group, FORM, ALIGN)
            up = 1.0 / unshift(d, FORM)[None, :]
            tile = (tile.to(tl.float32) * wide + least * up).to(AS)
            scale, zero = one, one - 1
    else:
        tile = raw_tile(data, stride, page, row, held, d, FORM, ALIGN).to(AS)
        scale, zero = one, one - 1
    return tile, scale, zero


@triton.jit
@no_type_check
def pages_of(
    table, slot, held, columns, TOKENS: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the page of each slot of a tile, and the row inside it."""
    if TOKENS % BLOCK == 0:  # the tile is inside one page: load a single page number
        column = tl.min(slot, axis=0) // TOKENS
        if REVERSE:
            column = columns - 1 - column
        page = tl.load(table + column).to(tl.int64) + tl.zeros([BLOCK], tl.int64)
    else:
        column = slot // TOKENS
        if REVERSE:
            column = columns - 1 - column
        page = tl.load(table + column, mask=held, other=0).to(tl.int64)
    return page, slot % TOKENS
