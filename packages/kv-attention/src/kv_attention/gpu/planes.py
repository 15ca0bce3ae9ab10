"""Products with integer codes: a byte is loaded once, and multiplied bit plane by bit plane.

A byte holds the codes of 8 / bits dimensions, `dim * bits / 8` apart (`reading`). The dimensions of
one place in the bytes are a plane. The products of a plane are those of its masked bytes with as
many dimensions of the query, so a tile is as wide as its bytes, and its work falls with the bits.
Values have a sum per plane.
"""

from typing import Final, no_type_check

import triton
import triton.language as tl

from kv_attention.gpu.arguments import PartArguments
from kv_attention.gpu.reading import WIDEN, unshift
from kv_attention.gpu.tiles import boost_of, bounded, factors_of

LEAST: Final = 16  # dimensions of a product of tensor cores
BITS: Final = (8, 4, 2)


def planar(part: PartArguments, products: tuple[object, ...]) -> bool:
    """Return whether a part has planes for the products: codes with one scale per vector.

    A plane must be as wide as a power of two, and products must be in float16, in which masked
    bytes are exact.
    """
    return (
        part.paged
        and all(each == tl.float16 for each in products)
        and all(_has_planes(form) for form in (part.key, part.value))
    )


def _has_planes(form: tuple[int, ...]) -> bool:
    kind, dim, bits, together = form[:4]
    width = dim * bits // 8
    whole = width * 8 == dim * bits and width & (width - 1) == 0
    return kind == 0 and bits in BITS and together >= dim and whole and width >= LEAST


@triton.jit
@no_type_check
def bytes_of(data, stride, page, row, FORM: tl.constexpr):
    """Load the bytes of vectors: [BLOCK, bytes of a vector], without a mask.

    An empty slot has a valid address, too, and its bytes have no effect: its logit is masked, and
    its weight is 0.
    """
    BYTES: tl.constexpr = FORM[1] * FORM[2] // 8
    start = page * stride + (FORM[4] + row * BYTES)
    at = start[:, None] + tl.arange(0, BYTES)[None, :]
    return tl.load(data + at)


@triton.jit
@no_type_check
def plane_of(raw, PLANE: tl.constexpr, FORM: tl.constexpr, ASM: tl.constexpr):
    """Return the codes of a plane times 2**shift, in float16."""
    MASK: tl.constexpr = (2 ** FORM[2] - 1) << (PLANE * FORM[2])
    mask = tl.broadcast_to(tl.full([1, 1], MASK, tl.uint8), raw.shape)
    if ASM:
        return tl.inline_asm_elementwise(
            WIDEN, "=r,=r,r,r", [raw, mask], dtype=tl.float16, is_pure=True, pack=4
        )
    return (raw & mask).to(tl.float16)


@triton.jit
@no_type_check
def scale_of(rows, asked, scale, KEY: tl.constexpr, PADDED: tl.constexpr):
    """Return the factor that normalizes queries, its inverse and their sums, as in `queries_of`.

    The last two include `scale`.
    """
    d = tl.arange(0, PADDED)
    there = asked[:, None] & (d < KEY[1])[None, :]
    plain = tl.load(rows + d[None, :], mask=there, other=0).to(tl.float32)
    largest = tl.max(tl.abs(plain * unshift(d, KEY)[None, :]), axis=1)
    up, down = factors_of(largest)
    return up, down * scale, tl.sum(plain, axis=1) * scale


@triton.jit
@no_type_check
def query_plane(rows, asked, up, PLANE: tl.constexpr, KEY: tl.constexpr):
    """Load the dimensions of queries that belong to a plane, scaled by `up` and 2**-shift."""
    BYTES: tl.constexpr = KEY[1] * KEY[2] // 8
    DOWN: tl.constexpr = 2 ** (PLANE * KEY[2])
    d = PLANE * BYTES + tl.arange(0, BYTES)
    plain = tl.load(rows + d[None, :], mask=asked[:, None], other=0).to(tl.float32)
    return (plain * up[:, None] / DOWN).to(tl.float16)


@triton.jit
@no_type_check
def queries_by_plane(rows, asked, up, KEY: tl.constexpr):
    """Load queries by plane: a tuple of 8 / bits tiles."""
    found = (query_plane(rows, asked, up, 0, KEY),)
    for i in tl.static_range(1, 8 // KEY[2]):
        found += (query_plane(rows, asked, up, i, KEY),)
    return found


@triton.jit
@no_type_check
def zeros_by_plane(ROWS: tl.constexpr, VALUE: tl.constexpr):
    """Return sums of values before any token, by plane."""
    BYTES: tl.constexpr = VALUE[1] * VALUE[2] // 8
    none = tl.zeros([ROWS, BYTES], tl.float32)
    found = (none,)
    for _ in tl.static_range(1, 8 // VALUE[2]):
        found += (none,)
    return found


@triton.jit
@no_type_check
def weighed_by_plane(sums, shrink, p, raw, scale, VALUE: tl.constexpr, ASM: tl.constexpr):
    """Add the weighted bytes of a tile of values to the sums, `boost_of` too large."""
    weights = (p * (scale * boost_of(VALUE))[None, :]).to(tl.float16)
    found = (tl.dot(weights, plane_of(raw, 0, VALUE, ASM), sums[0] * shrink[:, None]),)
    for i in tl.static_range(1, 8 // VALUE[2]):
        more = tl.dot(weights, plane_of(raw, i, VALUE, ASM), sums[i] * shrink[:, None])
        found += (more,)
    return found


@triton.jit
@no_type_check
def put_planes(into, sums, shift, weight, asked, VALUE: tl.constexpr):
    """Store the sums over the sum of weights, without 2**shift."""
    BYTES: tl.constexpr = VALUE[1] * VALUE[2] // 8
    whole = tl.where(weight > 0, weight, 1.0)[:, None]
    for i in tl.static_range(8 // VALUE[2]):
        found = sums[i] / (boost_of(VALUE) * 2 ** (i * VALUE[2]))
        found = (found + shift[:, None]) / whole
        d = i * BYTES + tl.arange(0, BYTES)
        tl.store(into + d[None, :], found, mask=asked[:, None])


@triton.jit
@no_type_check
def logits_of_planes(
    planes,
    back,
    total,
    raw,
    scale,
    zero,
    softcap,
    FORM: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute logits of queries, by plane, with the bytes of keys: [rows, BLOCK], float32."""
    found = tl.dot(planes[0], tl.trans(plane_of(raw, 0, FORM, ASM)))
    for i in tl.static_range(1, 8 // FORM[2]):
        found = tl.dot(planes[i], tl.trans(plane_of(raw, i, FORM, ASM)), found)
    found = found * back[:, None] * scale[None, :] + total[:, None] * zero[None, :]
    if CAPPED:
        found = bounded(found, softcap)
    return found
