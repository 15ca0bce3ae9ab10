"""Vectors as integer codes with scales and zero points, bit-identical to `kv_quant.integer`.

A tile has an axis of tokens, one of the codes that share a byte, and one of bytes: dimension d is
code d // stride of byte d % stride, so packing is a sum and unpacking a shift.
"""

from typing import no_type_check

import triton
import triton.language as tl

from kv_paging.gpu.bits import as_float, from_half, half_bits, load_bits, store_bits


@triton.jit
@no_type_check
def clean(x):
    """`kv_quant.affine.clean`: replace NaN, clamp to the limits, and drop the sign of zero."""
    x = as_float(x)
    x = tl.where(x != x, 0.0, x)
    return tl.minimum(tl.maximum(x, -32752.0), 32752.0) + 0.0


@triton.jit
@no_type_check
def affine(least, greatest, BITS: tl.constexpr):
    """`kv_quant.affine.affine`: return the bits of scales and zero points."""
    flat = least == greatest
    near = half_bits(least)
    size = from_half(near)
    below = tl.where(size > 0, near - 1, tl.where(size < 0, near + 1, -0x7FFF))
    zero = tl.where(flat | (size <= least), near, below)
    span = tl.where(flat, 0.0, greatest - from_half(zero))
    step = tl.div_rn(span, tl.full(span.shape, 2.0**BITS - 1, tl.float32))
    scale = half_bits(step)
    return tl.where(from_half(scale) < step, scale + 1, scale), zero


@triton.jit
@no_type_check
def quantized(x, scale, zero):
    """Return the codes of cleaned numbers; adding 1.5 * 2**23 rounds to integers, ties to even."""
    divisor = tl.where(scale == 0, float("inf"), scale)  # a constant group gets codes 0
    code = tl.div_rn(x - zero, divisor) + 12582912.0
    return code.to(tl.int32, bitcast=True) & 0xFF


@triton.jit
@no_type_check
def spread(per_group, index, ROWS: tl.constexpr, PLANES: tl.constexpr, WIDE: tl.constexpr):
    """Broadcast each group's number to its codes."""
    flat = tl.broadcast_to(tl.reshape(index, (1, PLANES * WIDE)), (ROWS, PLANES * WIDE))
    return tl.reshape(tl.gather(per_group, flat, 1), (ROWS, PLANES, WIDE))


@triton.jit
@no_type_check
def encode_codes(
    page, row, some, x, first, step, HALF: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr
):
    """Encode a vector per marked token, elements at x + first + d * step, to its page's row."""
    DIM: tl.constexpr = HALF[1]
    BITS: tl.constexpr = HALF[2]
    GROUP: tl.constexpr = HALF[3]
    STRIDE: tl.constexpr = (DIM * BITS + 7) // 8
    PLANES: tl.constexpr = 8 // BITS
    WIDE: tl.constexpr = triton.next_power_of_2(STRIDE)
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    ALIGNED: tl.constexpr = (ALIGN % 2 == 0) and (HALF[5] % 2 == 0)
    lane = tl.arange(0, WIDE)
    plane = tl.arange(0, PLANES)
    d = plane[:, None] * STRIDE + lane[None, :]
    there = (lane < STRIDE)[None, :] & (d < DIM)
    vector = x + first
    numbers = clean(
        tl.load(
            vector[:, None, None] + d[None, :, :] * step,
            some[:, None, None] & there[None, :, :],
            other=0.0,
        )
    )
    meta = page + HALF[5] + row * (4 * GROUPS)
    if GROUPS == 1:
        least = tl.where(there[None, :, :], numbers, float("inf"))
        most = tl.where(there[None, :, :], numbers, float("-inf"))
        scale, zero = affine(tl.min(tl.min(least, 2), 1), tl.max(tl.max(most, 2), 1), BITS)
        store_bits(meta, scale, some, 2, ALIGNED)
        store_bits(meta + 2, zero, some, 2, ALIGNED)
        size = from_half(scale)[:, None, None]
        base = from_half(zero)[:, None, None]
    else:
        COUNT: tl.constexpr = triton.next_power_of_2(GROUPS)
        group = tl.arange(0, COUNT)
        inner = tl.arange(0, triton.next_power_of_2(GROUP))
        e = group[:, None] * GROUP + inner[None, :]
        inside = (inner < GROUP)[None, :] & (e < DIM)
        again = clean(
            tl.load(
                vector[:, None, None] + e[None, :, :] * step,
                some[:, None, None] & inside[None, :, :],
                other=0.0,
            )
        )
        least = tl.min(tl.where(inside[None, :, :], again, float("inf")), 2)
        most = tl.max(tl.where(inside[None, :, :], again, float("-inf")), 2)
        scale, zero = affine(least, most, BITS)
        place = meta[:, None] + 2 * group[None, :]
        real = some[:, None] & (group < GROUPS)[None, :]
        store_bits(place, scale, real, 2, ALIGNED)
        store_bits(place + 2 * GROUPS, zero, real, 2, ALIGNED)
        index = tl.minimum(d // GROUP, GROUPS - 1)
        size = spread(from_half(scale), index, ROWS, PLANES, WIDE)
        base = spread(from_half(zero), index, ROWS, PLANES, WIDE)
    codes = tl.where(there[None, :, :], quantized(numbers, size, base), 0)
    byte = tl.sum(codes << (BITS * plane)[None, :, None], 1)
    place = (page + HALF[4] + row * STRIDE)[:, None] + lane[None, :]
    tl.store(place, byte.to(tl.uint8), some[:, None] & (lane < STRIDE)[None, :])


@triton.jit
@no_type_check
def coded(page, row, some, HALF: tl.constexpr, ALIGN: tl.constexpr):
    """Return the vectors of the marked tokens, by the code of a byte and the byte."""
    DIM: tl.constexpr = HALF[1]
    BITS: tl.constexpr = HALF[2]
    GROUP: tl.constexpr = HALF[3]
    STRIDE: tl.constexpr = (DIM * BITS + 7) // 8
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    ALIGNED: tl.constexpr = (ALIGN % 2 == 0) and (HALF[5] % 2 == 0)
    lane = tl.arange(0, triton.next_power_of_2(STRIDE))
    plane = tl.arange(0, 8 // BITS)
    d = plane[:, None] * STRIDE + lane[None, :]
    there = (lane < STRIDE)[None, :] & (d < DIM)
    place = (page + HALF[4] + row * STRIDE)[:, None] + lane[None, :]
    byte = tl.load(place, some[:, None] & (lane < STRIDE)[None, :], other=0).to(tl.int32)
    codes = (byte[:, None, :] >> (BITS * plane)[None, :, None]) & (2**BITS - 1)
    meta = page + HALF[5] + row * (4 * GROUPS)
    if GROUPS == 1:
        scale = from_half(load_bits(meta, some, 2, ALIGNED))[:, None, None]
        zero = from_half(load_bits(meta + 2, some, 2, ALIGNED))[:, None, None]
    else:
        marked = some[:, None, None] & there[None, :, :]
        place = meta[:, None, None] + 2 * (d // GROUP)[None, :, :]
        scale = from_half(load_bits(place, marked, 2, ALIGNED))
        zero = from_half(load_bits(place + 2 * GROUPS, marked, 2, ALIGNED))
    return codes.to(tl.float32) * scale + zero


@triton.jit
@no_type_check
def decode_codes(page, row, some, out, first, real, HALF: tl.constexpr, ALIGN: tl.constexpr):
    """Decode a vector per token to out + first + d; zeros if real but not marked."""
    DIM: tl.constexpr = HALF[1]
    STRIDE: tl.constexpr = (DIM * HALF[2] + 7) // 8
    lane = tl.arange(0, triton.next_power_of_2(STRIDE))
    d = tl.arange(0, 8 // HALF[2])[:, None] * STRIDE + lane[None, :]
    there = (lane < STRIDE)[None, :] & (d < DIM)
    tl.store(
        (out + first)[:, None, None] + d[None, :, :],
        coded(page, row, some, HALF, ALIGN),
        real[:, None, None] & there[None, :, :],
    )
