"""Prefill: many queries of a sequence over all parts of the tokens, as in FlashAttention.

One launch per part continues from the output and log-sum-exp of the previous ones (Dao et al.,
2022). The queries of a GQA group are rows of one tile, ordered by query, so that a tile of tokens
is unpacked once for all heads that share it.
"""

from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.gpu.arguments import LOG2E, PartArguments, adjacent
from kv_attention.gpu.reading import paged_tile, pages_of, unshift
from kv_attention.gpu.tiles import (
    boost_of,
    log_of,
    logits_of,
    places_of,
    plain_tile,
    present,
    queries_of,
    query_rows,
    sinks_of,
    soften,
    weighed,
)
from kv_attention.gpu.tuning import Machine, tiling
from kv_attention.partial import Partial
from kv_policy.launching import launching_on, strides_of

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def read_key(
    tokens,
    table,
    pitch,
    r,
    b,
    h,
    slot,
    count,
    d,
    PAGED: tl.constexpr,
    KEY: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    AS: tl.constexpr,
    REST: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load a tile of keys, one of REST further dimensions, and scales and zero points.

    Also return the mask of occupied slots, and the page and the row of each slot, or the positions
    of dense tokens.
    """
    held = slot < count
    if PAGED:
        mine = table + r.to(tl.int64) * pitch
        page, row = pages_of(mine, slot, held, pitch, PAGE[0], PAGE[2], BLOCK)
        held = present(tokens, page, row, held, PAGE)
        tile, scale, zero = paged_tile(
            tokens[0], tokens[1], page, row, held, d, KEY, PAGE[3], AS, ASM
        )
        more = tile
        if REST:
            e = d.shape[0] + tl.arange(0, REST)
            more, _, _ = paged_tile(tokens[0], tokens[1], page, row, held, e, KEY, PAGE[3], AS, ASM)
        return tile, more, scale, zero, held, page, row
    else:  # code after a return is still compiled
        place = places_of(table, pitch, b, slot, held).to(tl.int64)
        held = place >= 0
        tile = plain_tile(tokens[0], tokens[1], b, h, slot, held, d, KEY).to(AS)
        more = tile
        if REST:
            e = d.shape[0] + tl.arange(0, REST)
            more = plain_tile(tokens[0], tokens[1], b, h, slot, held, e, KEY).to(AS)
        one = tl.full([BLOCK], 1.0, tl.float32)
        return tile, more, one, one - 1, held, place, slot


@triton.jit
@no_type_check
def behind(table, pitch, b, width, latest, WIDE: tl.constexpr):
    """Return the end of the dense tokens that a query at position `latest` may see."""
    last = tl.zeros((), tl.int32)
    for first in range(0, width, WIDE):
        slot = first + tl.arange(0, WIDE)
        place = places_of(table, pitch, b, slot, slot < width)
        last = tl.maximum(last, tl.max(tl.where((place >= 0) & (place <= latest), slot + 1, 0), 0))
    return last


@triton.jit(
    do_not_specialize=["pitch", "queries", "heads"],
    do_not_specialize_on_alignment=["position", "length", "table"],
)
@no_type_check
def prompt_kernel(
    q,
    q_strides,
    position,
    before,
    before_lse,
    out,
    lse,
    length,
    tokens,
    table,
    pitch,
    sinks,
    queries,
    heads,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PAGED: tl.constexpr,
    CONTINUES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    AS: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute attention over a part, or continue from the result of other parts.

    `before` and `out` are [table_rows, GROUP, queries, Dv], `before_lse` and `lse`
    [table_rows, GROUP, queries] in natural logarithms; with CONTINUES, `before` is merged in.
    `position` is [B, queries], -1 for padding, whose result is 0 and -inf. With SINKS, but without
    CONTINUES, `sinks` [heads, GROUP] take part. With CAPPED, `softcap` is the bound of the logits,
    in base 2.
    """
    OUT: tl.constexpr = PADDED[1]  # in Triton 3.6 an element is not a constexpr by itself
    r = tl.program_id(1)
    b, h = r // heads, r % heads
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, g = line // GROUP, line % GROUP
    real = query < queries
    d, dv = tl.arange(0, PADDED[0]), tl.arange(0, PADDED[1])
    at = tl.load(position + b.to(tl.int64) * queries + query, mask=real, other=-1)
    rows = query_rows(q, q_strides, b, h, g.to(tl.int64), query.to(tl.int64), KEY[1])[:, None]
    level, more_level, back, whole = queries_of(rows, at >= 0, scale, d, KEY, AS[0], REST)
    mine = (r.to(tl.int64) * GROUP + g) * queries + query
    place_out = mine[:, None] * VALUE[1] + dv[None, :]
    inside = real[:, None] & (dv < VALUE[1])[None, :]
    undo = unshift(dv, VALUE) / boost_of(VALUE)
    weight = tl.zeros([ROWS], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    if CONTINUES:  # the previous result acts as one token with its own logit and value
        highest = tl.load(before_lse + mine, mask=real, other=float("-inf")) / LN2
        weight = (highest > float("-inf")).to(tl.float32)
        sums = tl.load(before + place_out, mask=inside, other=0) / undo[None, :]
    else:
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        sums = tl.zeros([ROWS, OUT], tl.float32)
        if SINKS:
            highest, weight = sinks_of(sinks, h * GROUP + g, at >= 0)
    count = tl.load(length + r)
    if not PAGED:
        count = behind(table, pitch, b, count, tl.max(at, 0), WIDE)
    count = tl.where(tl.max(at, 0) >= 0, count, 0)
    for i in tl.range(0, (count + BLOCK - 1) // BLOCK, num_stages=STAGES):
        slot = i * BLOCK + tl.arange(0, BLOCK)
        key, more, k_scale, k_zero, held, page, row = read_key(
            tokens, table, pitch, r, b, h, slot, count, d, PAGED, KEY, PAGE, BLOCK, AS[0], REST, ASM
        )
        sees = held[None, :] & (at >= 0)[:, None]
        if PAGED:
            value, v_scale, v_zero = paged_tile(
                tokens[0], tokens[1], page, row, held, dv, VALUE, PAGE[3], AS[1], ASM
            )
        else:
            value = plain_tile(tokens[2], tokens[3], b, h, slot, held, dv, VALUE).to(AS[1])
            v_scale, v_zero = k_scale, k_zero
            sees = sees & (page[None, :] <= at[:, None])
        logits = logits_of(
            level,
            more_level,
            back,
            whole,
            key,
            more,
            k_scale,
            k_zero,
            softcap,
            KEY,
            "tf32x3",
            REST,
            CAPPED,
        )
        logits = tl.where(sees, logits, float("-inf"))
        p, shrink, highest, weight = soften(logits, highest, weight)
        shift = shift * shrink + tl.sum(p * v_zero[None, :], axis=1)
        sums = sums * shrink[:, None] + weighed(p, value, v_scale, VALUE, AS[1])
    sums = sums * undo[None, :] + shift[:, None]
    sums = sums / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(out + place_out, sums.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + mine, log_of(highest, weight) * LN2, mask=real)


def attend_to_all(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    parts: Sequence[PartArguments],
    value_dim: int,
    scale: float,
    machine: Machine,
    softcap: float | None = None,
    sinks: Float[Tensor, "H G"] | None = None,
    before: Partial | None = None,
) -> Partial:
    """Compute attention over all parts; 0 and -inf for a query that is padding or sees no token.

    Logits have the bound `softcap`, and `sinks` take part, if they are given. `before` is the
    attention over other tokens, with which the first part is merged. The output is in the dtype of
    the queries, the log-sum-exp in float32.
    """
    batch, heads, group, length, _ = q.shape
    found = Partial.empty(q, value_dim) if before is None else before
    q, position = adjacent(q), position.contiguous()
    if sinks is not None:
        sinks = sinks.contiguous()
        if not parts or before is not None:
            found = found.with_sinks(sinks).only(position >= 0)
    found = Partial(found.out.contiguous(), found.lse.contiguous())
    for i, part in enumerate(parts):
        form = tiling(machine, "prompt", part, q.dtype)
        rows = form.queries  # for short chunks, too: a smaller tile would be compiled for them
        into, dtype = found.out, q.dtype if i == len(parts) - 1 else torch.float32
        if into.dtype != dtype:
            into = torch.empty_like(found.out, dtype=dtype)
        with launching_on(q):
            prompt_kernel[(triton.cdiv(group * length, rows), batch * heads)](
                q,
                strides_of(q),
                position,
                found.out,
                found.lse,
                into,
                found.lse,
                part.lengths(batch * heads, q.device),
                part.tokens,
                part.table,
                part.pitch,
                found.lse if sinks is None else sinks,
                length,
                heads,
                scale * LOG2E,
                (softcap or 1.0) * LOG2E,
                CAPPED=softcap is not None,
                SINKS=sinks is not None and i == 0 and before is None,
                CONTINUES=i > 0 or before is not None,
                GROUP=group,
                ROWS=rows,
                BLOCK=form.block,
                WIDE=1024,
                VALUE=part.value,
                STAGES=form.stages,
                num_warps=form.warps,
                **part.constants(q.dtype, interpreted=machine.interpreted, asm=machine.asm),
            )
        found = Partial(into, found.lse)
    return Partial(found.out.to(q.dtype), found.lse)
