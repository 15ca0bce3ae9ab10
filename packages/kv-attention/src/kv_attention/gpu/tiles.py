"""Attention's operations on a tile of paged or dense tokens.

TOKENS are a program's arguments of a part. In pages: bytes and stride of a page. Dense: keys and
values, each with strides. `table` is the page table, or the positions of dense tokens, with a pitch
of rows.
"""

from typing import no_type_check

import triton
import triton.language as tl

from kv_attention.gpu.reading import unshift, word32


@triton.jit
@no_type_check
def stride_at(strides, i: tl.constexpr, DIM: tl.constexpr):
    """Return a stride of vectors of DIM elements, from `kv_policy.launching.strides_of`."""
    if DIM % 16:
        return strides[i] // 16
    else:
        return strides[i]


@triton.jit
@no_type_check
def product(a, b, PRECISION: tl.constexpr):
    """Multiply tiles; PRECISION, for float32 only: `tf32x3` has error 3 x 2**-20, `ieee` 0."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def factors_of(largest):
    """Return powers of two that scale rows with these maxima to about 64, and their inverses."""
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    some = exponent > 0
    up = tl.where(some, (254 << 23) - exponent, 0).to(tl.float32, bitcast=True)
    down = exponent.to(tl.float32, bitcast=True)
    return up * 64, down / 64


@triton.jit
@no_type_check
def queries_of(rows, asked, scale, d, KEY: tl.constexpr, AS: tl.constexpr, REST: tl.constexpr):
    """Load queries, `rows` [rows, 1] by address, for products with keys in the type AS.

    Returns them normalized, the dimensions of a second tile of REST ones (if there are none, the
    first tile again), the factor that undoes the normalization, and the sum of each query's
    elements; the last two include `scale`.
    """
    there = asked[:, None] & (d < KEY[1])[None, :]
    plain = tl.load(rows + d[None, :], mask=there, other=0).to(tl.float32)
    level = plain * unshift(d, KEY)[None, :]
    whole, largest = tl.sum(plain, axis=1), tl.max(tl.abs(level), axis=1)
    more = level
    if REST:
        e = d.shape[0] + tl.arange(0, REST)
        there = asked[:, None] & (e < KEY[1])[None, :]
        plain = tl.load(rows + e[None, :], mask=there, other=0).to(tl.float32)
        more = plain * unshift(e, KEY)[None, :]
        whole += tl.sum(plain, axis=1)
        largest = tl.maximum(largest, tl.max(tl.abs(more), axis=1))
    up, down = factors_of(largest)
    level, more = (level * up[:, None]).to(AS), (more * up[:, None]).to(AS)
    return level, more, down * scale, whole * scale


@triton.jit
@no_type_check
def bounded(x, most):
    """Return most * tanh(x / most).

    tanh is x P(x^2) / Q(x^2) with polynomials of degree 4, fitted to the least relative error up to
    8.7, from where on it is 1 to within the rounding of float32. NaN remains NaN.
    """
    y = x / most
    y = tl.where(y > 8.7, 8.7, tl.where(y < -8.7, -8.7, y))
    z = y * y
    p = (z * 1.389589881e-8 + 2.099272441e-5) * z + 3.518682918e-3
    p = (p * z + 1.340041728e-1) * z + 1.0
    q = (z * 7.995860019e-7 + 3.323543652e-4) * z + 2.596466787e-2
    q = (q * z + 4.673373756e-1) * z + 1.0
    return y * p / q * most


@triton.jit
@no_type_check
def sinks_of(sinks, at, asked):
    """Load sinks, as the maximum and the sum of an online softmax in base 2 that begins with them.

    A sink is a token whose value is 0; without one these are -inf and 0.
    """
    highest = tl.load(sinks + at, mask=asked, other=float("-inf")).to(tl.float32)
    return highest * 1.4426950408889634, tl.where(highest == float("-inf"), 0.0, 1.0)


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
def places_of(table, pitch, b, slot, inside):
    """Load positions of dense tokens; -1 for empty slots."""
    return tl.load(table + b.to(tl.int64) * pitch + slot, mask=inside, other=-1)


@triton.jit
@no_type_check
def plain_tile(base, strides, b, h, slot, held, d, FORM: tl.constexpr):
    """Load rows of a dense tensor, in its dtype."""
    there = held[:, None] & (d < FORM[1])[None, :]
    table_row = b.to(tl.int64) * stride_at(strides, 0, FORM[1])
    table_row += h.to(tl.int64) * stride_at(strides, 1, FORM[1])
    at = slot.to(tl.int64)[:, None] * stride_at(strides, 2, FORM[1]) + d[None, :]
    return tl.load(base + (table_row + at), mask=there, other=0)


@triton.jit
@no_type_check
def query_rows(q, strides, b, h, g, query, DIM: tl.constexpr):
    """Return the addresses of queries of one KV head, by index in the group and number."""
    first = b.to(tl.int64) * stride_at(strides, 0, DIM) + h.to(tl.int64) * stride_at(
        strides, 1, DIM
    )
    return q + (first + g * stride_at(strides, 2, DIM) + query * stride_at(strides, 3, DIM))


@triton.jit
@no_type_check
def logits_of(
    q,
    more_q,
    back,
    total,
    tile,
    more,
    scale,
    zero,
    softcap,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    REST: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Compute logits of normalized queries with a tile of keys: [rows, BLOCK], float32.

    `back` undoes the normalization and includes the scale of the logits; `total` is the sum of each
    query's elements, with that scale. With REST, `more_q` and `more` have further dimensions. With
    CAPPED, `softcap` is the bound of the logits.
    """
    found = product(q, tl.trans(tile), PRECISION)
    if REST:
        found += product(more_q, tl.trans(more), PRECISION)
    found = found * back[:, None]
    if FORM[0] == 0 and FORM[3] >= FORM[1]:
        found = found * scale[None, :] + total[:, None] * zero[None, :]
    if CAPPED:
        found = bounded(found, softcap)
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
