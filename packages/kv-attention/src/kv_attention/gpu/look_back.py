"""The second pass of a prompt: how much attention each token got, without the attention matrix.

A program holds a tile of keys and goes over the queries; with the log-sum-exp of the first pass it
works out their attention anew and sums it, column by column.
"""

from typing import no_type_check

import triton
import triton.language as tl

from kv_attention.gpu.prompt import read_key
from kv_attention.gpu.reading import unshift
from kv_attention.gpu.tiles import logits_of, normalized
from kv_attention.gpu.watch import LOG2E, finite, term_of


@triton.jit
@no_type_check
def attention_of(
    q,
    q_strides,
    q_step,
    lse,
    r,
    b,
    h,
    g,
    query,
    queries,
    at,
    sees,
    key,
    k_scale,
    k_zero,
    d,
    scale,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    AS: tl.constexpr,
):
    """Attention of queries of one head to a tile of keys: [queries, BLOCK]."""
    rows = q + (b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1])
    rows = rows + (g * q_strides[2] + query.to(tl.int64) * q_step)[:, None]
    asked = (at >= 0)[:, None] & (d < KEY[1])[None, :]
    plain = tl.load(rows + d[None, :] * q_strides[3], mask=asked, other=0).to(tl.float32)
    level, back = normalized(plain * unshift(d, KEY)[None, :])
    whole = tl.sum(plain, axis=1) * scale
    logits = logits_of(level.to(AS), back * scale, whole, key, k_scale, k_zero, KEY, "ieee")
    mine = lse + (r.to(tl.int64) * GROUP + g) * queries + query
    found = finite(tl.load(mine, mask=at >= 0, other=0)) * LOG2E
    return tl.where(sees, tl.exp2(logits - found[:, None]), 0.0)


@triton.jit
@no_type_check
def look_back_kernel(
    q,
    q_strides,
    q_step,
    position,
    lse,
    length,
    tokens,
    places,
    place_strides,
    mass,
    seen,
    width,
    queries,
    streams,
    heads,
    scale,
    above,
    skip,
    PAGED: tl.constexpr,
    GROUP: tl.constexpr,
    MODE: tl.constexpr,
    TERMS: tl.constexpr,
    FAR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AS: tl.constexpr,
    PADDED: tl.constexpr,
    KEY: tl.constexpr,
    PAGE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Sum each term over queries and a group: `mass` is [terms, streams, width].

    `lse` is [streams, GROUP, queries] in natural logarithms, `position` [B, queries], ascending but
    for padding at -1. MODE: 0 sums over the group, 1 takes the mean, 2 the largest of each query,
    3 the largest of the heads' sums. `seen` [streams, width] counts queries.
    """
    r = tl.program_id(1)
    b, h = r // heads, r % heads
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED[0])
    count = tl.load(length + r)
    key, k_scale, k_zero, held, page, _ = read_key(
        tokens, r, b, h, slot, count, d, PAGED, KEY, PAGE, BLOCK, AS[0], ASM
    )
    nearest = tl.zeros([BLOCK], tl.int64)  # the first position that counts for a token
    if FAR:
        mine = places + b.to(tl.int64) * place_strides[0] + h.to(tl.int64) * place_strides[1]
        place = tl.load(mine + slot.to(tl.int64) * place_strides[2], mask=held, other=0)
        nearest = tl.maximum(place + skip, 0).to(tl.int64)
    if not PAGED:
        nearest = tl.maximum(nearest, page)
    earliest = tl.min(tl.where(held, nearest, 2**62), 0)
    into = r.to(tl.int64) * width + slot
    counted = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(len(TERMS)):
        best = tl.zeros([BLOCK], tl.float32)
        for outer in range(1 if MODE == 2 else GROUP):
            sums = tl.zeros([BLOCK], tl.float32)
            for first in range(0, queries, ROWS):
                query = first + tl.arange(0, ROWS)
                inside = query < queries
                at = tl.load(position + b.to(tl.int64) * queries + query, mask=inside, other=-1)
                if tl.max(at, 0) >= earliest:
                    sees = held[None, :] & (at >= 0)[:, None] & (at[:, None] >= nearest[None, :])
                    even = (1.0 / tl.maximum(at + 1, 1).to(tl.float32))[:, None]
                    if i == 0:
                        more = tl.sum(sees.to(tl.int32), 0)
                        counted += tl.where(outer == 0, more, 0)
                    largest = tl.zeros([ROWS, BLOCK], tl.float32)
                    for inner in range(GROUP if MODE == 2 else 1):
                        p = attention_of(
                            q,
                            q_strides,
                            q_step,
                            lse,
                            r,
                            b,
                            h,
                            outer + inner,
                            query,
                            queries,
                            at,
                            sees,
                            key,
                            k_scale,
                            k_zero,
                            d,
                            scale,
                            GROUP,
                            KEY,
                            AS[0],
                        )
                        largest = tl.maximum(largest, term_of(p, even, above, TERMS[i]))
                    sums += tl.sum(largest, 0)
            best = tl.maximum(best, sums) if MODE == 3 else best + sums
        if MODE == 1:
            best = best / GROUP
        tl.store(mass + (i * streams.to(tl.int64) * width + into), best, mask=slot < width)
    tl.store(seen + into, counted, mask=slot < width)
