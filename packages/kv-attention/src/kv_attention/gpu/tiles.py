"""Attention's operations on a tile of paged or dense tokens.

TOKENS are a program's arguments of a part. In pages: bytes, stride of a page, page table and its
columns. Dense: keys, values and positions with their strides.
"""

from typing import no_type_check

import triton
import triton.language as tl

from kv_attention.gpu.reading import word32


@triton.jit
@no_type_check
def product(a, b, PRECISION: tl.constexpr):
    """Multiply tiles; PRECISION, for float32 only: `tf32x3` has error 3 x 2**-20, `ieee` 0."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def normalized(q):
    """Return queries times powers of two that scale them to about 64, and the inverse factors."""
    largest = tl.max(tl.abs(q), axis=1)
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    some = exponent > 0
    up = tl.where(some, (254 << 23) - exponent, 0).to(tl.float32, bitcast=True)
    down = exponent.to(tl.float32, bitcast=True)
    return q * (up * 64)[:, None], down / 64


@triton.jit
@no_type_check
def present(tokens, page, row, held, PAGE: tl.constexpr):
    """Return the mask of slots that hold a token, if some are holes."""
    if PAGE[1] >= 0:
        at = PAGE[1] + 4 * row
        place = word32(tokens[0], tokens[1], page, at, held, PAGE[3])
        return held & (place.to(tl.int32, bitcast=True) >= 0)
    return held


@triton.jit
@no_type_check
def places_of(tokens, b, slot, inside):
    """Load positions of dense tokens; -1 for empty slots."""
    at = tokens[4] + b.to(tl.int64) * tokens[5] + slot.to(tl.int64) * tokens[6]
    return tl.load(at, mask=inside, other=-1)


@triton.jit
@no_type_check
def plain_tile(base, strides, b, h, slot, held, d, FORM: tl.constexpr):
    """Load rows of a dense tensor, in its dtype."""
    there = held[:, None] & (d < FORM[1])[None, :]
    table_row = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    at = slot.to(tl.int64)[:, None] * strides[2] + d.to(tl.int64)[None, :] * strides[3]
    return tl.load(base + (table_row + at), mask=there, other=0)


@triton.jit
@no_type_check
def logits_of(q, back, total, tile, scale, zero, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """Compute logits of normalized queries with a tile of keys: [rows, BLOCK], float32.

    `back` undoes the normalization and includes the scale of the logits; `total` is the sum of each
    query's elements, with that scale.
    """
    found = product(q, tl.trans(tile), PRECISION) * back[:, None]
    if FORM[0] == 0 and FORM[3] >= FORM[1]:
        found = found * scale[None, :] + total[:, None] * zero[None, :]
    return found


@triton.jit
@no_type_check
def boost_of(FORM: tl.constexpr):
    """Return a power of two for scales that keeps small ones away from float16 underflow.

    The largest scale of a format remains a finite float16.
    """
    if FORM[0] == 0 and FORM[3] >= FORM[1]:
        return 1.0 * 2 ** (FORM[2] - 1)
    return 1.0


@triton.jit
@no_type_check
def weighed(p, tile, scale, FORM: tl.constexpr, AS: tl.constexpr):
    """Return weighted sums of a tile of values, `boost_of` too large: [rows, PADDED], float32."""
    if FORM[0] == 0 and FORM[3] >= FORM[1]:
        p = p * (scale * boost_of(FORM))[None, :]
    return product(p.to(AS), tile, "tf32x3")


@triton.jit
@no_type_check
def soften(logits, highest, weight):
    """Apply one step of an online softmax in base 2 (Milakov and Gimelshein, 2018).

    Returns the weights of this tile, the factor of earlier sums, the new maximum and the new sum.
    """
    higher = tl.maximum(highest, tl.max(logits, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # no -inf - -inf if no token is visible
    p = tl.exp2(logits - safe[:, None])
    shrink = tl.exp2(highest - safe)
    return p, shrink, higher, weight * shrink + tl.sum(p, axis=1)


@triton.jit
@no_type_check
def log_of(highest, weight):
    """Return the log-sum-exp in base 2; -inf if no token is visible."""
    some = weight > 0
    return tl.where(some, highest + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
