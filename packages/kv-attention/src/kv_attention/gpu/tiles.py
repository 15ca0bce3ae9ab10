"""A tile of tokens, in pages or in plain tensors, and what attention does with it.

TOKENS is what a program gets of a part. In pages: bytes, stride of a page, page table and its
columns. In plain tensors: keys, values and positions with their strides.
"""

from typing import no_type_check

import triton
import triton.language as tl

from kv_attention.gpu.reading import word32


@triton.jit
@no_type_check
def product(a, b, PRECISION: tl.constexpr):
    """A product of tiles; PRECISION, of float32 alone: `tf32x3` leaves out 3 x 2**-20, `ieee` 0."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def normalized(q):
    """Rows of queries times powers of two that bring them near 64, and what takes that back."""
    largest = tl.max(tl.abs(q), axis=1)
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    some = exponent > 0
    up = tl.where(some, (254 << 23) - exponent, 0).to(tl.float32, bitcast=True)
    down = exponent.to(tl.float32, bitcast=True)
    return q * (up * 64)[:, None], down / 64


@triton.jit
@no_type_check
def present(tokens, page, row, held, PAGE: tl.constexpr):
    """Which of the slots hold a token, where some are holes."""
    if PAGE[1] >= 0:
        at = PAGE[1] + 4 * row
        place = word32(tokens[0], tokens[1], page, at, held, PAGE[3])
        return held & (place.to(tl.int32, bitcast=True) >= 0)
    return held


@triton.jit
@no_type_check
def places_of(tokens, b, slot, inside):
    """Positions of plain tokens; -1 where there is none."""
    at = tokens[4] + b.to(tl.int64) * tokens[5] + slot.to(tl.int64) * tokens[6]
    return tl.load(at, mask=inside, other=-1)


@triton.jit
@no_type_check
def plain_tile(base, strides, b, h, slot, held, d, FORM: tl.constexpr):
    """Rows of a plain tensor, in the type that it has."""
    there = held[:, None] & (d < FORM[1])[None, :]
    table_row = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    at = slot.to(tl.int64)[:, None] * strides[2] + d.to(tl.int64)[None, :] * strides[3]
    return tl.load(base + (table_row + at), mask=there, other=0)


@triton.jit
@no_type_check
def logits_of(q, back, total, tile, scale, zero, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """Logits of normalized queries with a tile of keys: [rows, BLOCK], float32.

    `back` undoes the normalization and brings in the scale of the logits; `total` is the sum of
    each query's numbers, with that scale.
    """
    found = product(q, tl.trans(tile), PRECISION) * back[:, None]
    if FORM[0] == 0 and FORM[3] >= FORM[1]:
        found = found * scale[None, :] + total[:, None] * zero[None, :]
    return found


@triton.jit
@no_type_check
def boost_of(FORM: tl.constexpr):
    """A power of two for scales, so that small ones keep away from where float16 ends.

    The largest scale that a format has stays a float16.
    """
    if FORM[0] == 0 and FORM[3] >= FORM[1]:
        return 1.0 * 2 ** (FORM[2] - 1)
    return 1.0


@triton.jit
@no_type_check
def weighed(p, tile, scale, FORM: tl.constexpr, AS: tl.constexpr):
    """Sums of a tile of values with weights p, `boost_of` too large: [rows, PADDED], float32."""
    if FORM[0] == 0 and FORM[3] >= FORM[1]:
        p = p * (scale * boost_of(FORM))[None, :]
    return product(p.to(AS), tile, "tf32x3")


@triton.jit
@no_type_check
def soften(logits, highest, weight):
    """One step of an online softmax in powers of two (Milakov and Gimelshein, 2018).

    Returns the weights of this tile, what earlier sums shrink by, the new maximum and the new sum.
    """
    higher = tl.maximum(highest, tl.max(logits, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # no -inf - -inf where nothing is seen
    p = tl.exp2(logits - safe[:, None])
    shrink = tl.exp2(highest - safe)
    return p, shrink, higher, weight * shrink + tl.sum(p, axis=1)


@triton.jit
@no_type_check
def log_of(highest, weight):
    """The log-sum-exp in powers of two; -inf of nothing."""
    some = weight > 0
    return tl.where(some, highest + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
