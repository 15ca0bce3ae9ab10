"""Decode steps: one query per sequence and head over all parts of the tokens (split-KV).

One launch per part plans, another computes attention, and a last one combines. A lone dense token
in the last part, the step's own, is attended to while combining. The first layer of a step may plan
for all of them, see `TileCounts`.
The tiles of all table rows are concatenated and split evenly among the programs, across row
boundaries, so no program waits for the longest table row. For each table row in its range, a
program writes an output and a log-sum-exp to a separate slot: program p and table row r use slot
p + r, which is unique to this pair. `combine_kernel` merges them.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.gpu.arguments import LOG2E, PartArguments, adjacent, padded
from kv_attention.gpu.planes import (
    bytes_of,
    logits_of_planes,
    planar,
    put_planes,
    queries_by_plane,
    scale_of,
    weighed_by_plane,
    zeros_by_plane,
)
from kv_attention.gpu.reading import meta_of, paged_tile, pages_of, unshift
from kv_attention.gpu.tiles import (
    boost_of,
    bounded,
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
from kv_policy import TileCounts
from kv_policy.launching import launching_on, strides_of

WIDE: Final = 512  # table rows per iteration of a search; one compiled kernel suits any number
WIDEST_FRESH: Final = 256  # dimensions of the key of a token that is attended to while combining


@triton.jit(
    do_not_specialize=["table_rows", "pitch"], do_not_specialize_on_alignment=["length", "ends"]
)
@no_type_check
def plan_kernel(length, ends, table_rows, pitch, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Count tiles: ends[r] is the number of tiles in table rows 0 to r.

    A program counts those of one layer; `pitch` is between the `ends` of layers.
    """
    length += tl.program_id(0).to(tl.int64) * table_rows
    ends += tl.program_id(0).to(tl.int64) * pitch
    before = tl.zeros((), tl.int32)
    for first in range(0, table_rows, WIDE):
        at = first + tl.arange(0, WIDE)
        tokens = tl.load(length + at, mask=at < table_rows, other=0)
        tiles = (tokens + (BLOCK - 1)) // BLOCK
        tl.store(ends + at, before + tl.cumsum(tiles, 0), mask=at < table_rows)
        before += tl.sum(tiles, 0)


@triton.jit
@no_type_check
def table_row_of(ends, table_rows, tile, WIDE: tl.constexpr):
    """Return the table row of a tile: the number of table rows that end before it."""
    count = tl.zeros((), tl.int32)
    for first in range(0, table_rows, WIDE):
        at = first + tl.arange(0, WIDE)
        ended = tl.load(ends + at, mask=at < table_rows, other=2**31 - 1) <= tile
        count += tl.sum(ended.to(tl.int32), 0)
    return count


@triton.jit(
    do_not_specialize=["width", "pitch", "table_rows", "heads"],
    do_not_specialize_on_alignment=["position", "ends", "length", "table"],
)
@no_type_check
def decode_kernel(
    q,
    q_strides,
    position,
    found,
    lse,
    logits,
    width,
    ends,
    length,
    tokens,
    table,
    pitch,
    table_rows,
    heads,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    PAGED: tl.constexpr,
    PLANAR: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    WATCH: tl.constexpr,
    AS: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute attention over a range of the tiles of a part.

    `found` is [slots, GROUP, Dv] and `lse` [slots, GROUP], in base 2. With WATCH, `logits`
    [table_rows, GROUP, width] stores every logit, -inf if no token is visible. AS and PADDED: of
    keys and of values; REST: dimensions of keys after those, in a tile of their own. With CAPPED,
    `softcap` is the bound of the logits, in base 2. PAGE: tokens of a page, offset of positions or
    -1, whether the table is reversed, and the alignment of addresses.
    """
    OUT: tl.constexpr = PADDED[1]  # in Triton 3.6 an element is not a constexpr by itself
    program = tl.program_id(0)
    total = tl.load(ends + table_rows - 1)
    share = tl.maximum((total + tl.num_programs(0) - 1) // tl.num_programs(0), 1)
    tile = program * share
    last = tl.minimum(tile + share, total)
    r = table_row_of(ends, table_rows, tile, WIDE)
    g, d, dv = tl.arange(0, ROWS), tl.arange(0, PADDED[0]), tl.arange(0, PADDED[1])
    while tile < last:
        stop = tl.load(ends + r)
        if stop > tile:  # a table row without tokens has no tile
            start = tl.load(ends + r - 1, mask=r > 0, other=0)
            here = tl.minimum(stop, last)
            b, h = r // heads, r % heads
            count, at = tl.load(length + r), tl.load(position + b)
            rows = query_rows(q, q_strides, b, h, g, 0, KEY[1])[:, None]
            if PLANAR:
                up, back, whole = scale_of(rows, g < GROUP, scale, KEY, PADDED[0])
                planes = queries_by_plane(rows, g < GROUP, up, KEY)
                sums = zeros_by_plane(ROWS, VALUE)
            else:
                level, more_level, back, whole = queries_of(
                    rows, g < GROUP, scale, d, KEY, AS[0], REST
                )
                sums = tl.zeros([ROWS, OUT], tl.float32)
            highest = tl.full([ROWS], float("-inf"), tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            shift = tl.zeros([ROWS], tl.float32)
            for i in tl.range(tile - start, here - start, num_stages=STAGES):
                slot = i * BLOCK + tl.arange(0, BLOCK)
                held = slot < count
                if PAGED:
                    data, stride = tokens[0], tokens[1]
                    mine = table + r.to(tl.int64) * pitch
                    page, row = pages_of(mine, slot, held, pitch, PAGE[0], PAGE[2], BLOCK)
                    held = present(tokens, page, row, held, PAGE)
                    if PLANAR:
                        key = bytes_of(data, stride, page, row, KEY)
                        value = bytes_of(data, stride, page, row, VALUE)
                        k_scale, k_zero = meta_of(data, stride, page, row, held, 0, KEY, PAGE[3])
                        v_scale, v_zero = meta_of(data, stride, page, row, held, 0, VALUE, PAGE[3])
                    else:
                        key, k_scale, k_zero = paged_tile(
                            data, stride, page, row, held, d, KEY, PAGE[3], AS[0], ASM
                        )
                        more = key
                        if REST:
                            e = PADDED[0] + tl.arange(0, REST)
                            more, _, _ = paged_tile(
                                data, stride, page, row, held, e, KEY, PAGE[3], AS[0], ASM
                            )
                        value, v_scale, v_zero = paged_tile(
                            data, stride, page, row, held, dv, VALUE, PAGE[3], AS[1], ASM
                        )
                else:
                    place = places_of(table, pitch, b, slot, held)
                    held = (place >= 0) & (place <= at)
                    key = plain_tile(tokens[0], tokens[1], b, h, slot, held, d, KEY).to(AS[0])
                    more = key
                    if REST:
                        e = PADDED[0] + tl.arange(0, REST)
                        more = plain_tile(tokens[0], tokens[1], b, h, slot, held, e, KEY).to(AS[0])
                    value = plain_tile(tokens[2], tokens[3], b, h, slot, held, dv, VALUE).to(AS[1])
                    k_scale = tl.full([BLOCK], 1.0, tl.float32)
                    v_scale, k_zero, v_zero = k_scale, k_scale - 1, k_scale - 1
                if PLANAR:
                    found_here = logits_of_planes(
                        planes, back, whole, key, k_scale, k_zero, softcap, KEY, CAPPED, ASM
                    )
                else:
                    found_here = logits_of(
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
                found_here = tl.where(held[None, :], found_here, float("-inf"))
                if WATCH:
                    there = (g < GROUP)[:, None] & (slot < width)[None, :]
                    first = logits + r.to(tl.int64) * GROUP * width
                    tl.store(first + (g[:, None] * width + slot[None, :]), found_here, mask=there)
                p, shrink, highest, weight = soften(found_here, highest, weight)
                shift = shift * shrink + tl.sum(p * v_zero[None, :], axis=1)
                if PLANAR:
                    sums = weighed_by_plane(sums, shrink, p, value, v_scale, VALUE, ASM)
                else:
                    sums = sums * shrink[:, None] + weighed(p, value, v_scale, VALUE, AS[1])
            slot_of = (program + r).to(tl.int64) * GROUP + g
            into = found + slot_of[:, None] * VALUE[1]
            if PLANAR:
                put_planes(into, sums, shift, weight, g < GROUP, VALUE)
            else:
                sums = sums * (unshift(dv, VALUE) / boost_of(VALUE))[None, :] + shift[:, None]
                sums = sums / tl.where(weight > 0, weight, 1.0)[:, None]
                there = (g < GROUP)[:, None] & (dv < VALUE[1])[None, :]
                tl.store(into + dv[None, :], sums, mask=there)
            tl.store(lse + slot_of, log_of(highest, weight), mask=g < GROUP)
            tile = here
        r += 1


@triton.jit(
    do_not_specialize=["pitch", "table_rows", "heads", "programs", "slots"],
    do_not_specialize_on_alignment=["ends", "position", "table"],
)
@no_type_check
def combine_kernel(
    out,
    lse_out,
    found,
    lse,
    ends,
    position,
    sinks,
    q,
    q_strides,
    logits,
    tokens,
    table,
    pitch,
    table_rows,
    heads,
    programs,
    slots,
    scale,
    softcap,
    PARTS: tl.constexpr,
    FRESH: tl.constexpr,
    WATCH: tl.constexpr,
    CAPPED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Merge the programs' results per table row, over all parts.

    `ends` are [table_rows] of each part, with `slots`. `out` is [table_rows, GROUP,
    DIM], `lse_out` [table_rows, GROUP] in natural logs; 0 and -inf if the query is padding or sees
    no token. With SINKS, `sinks` [heads, GROUP] take part, once per query. With FRESH, `tokens` are
    one dense token per sequence, whose key has at most WIDTH dimensions; with WATCH, `logits`
    [table_rows, GROUP] are its logits, as in `decode_kernel`.
    """
    r = tl.program_id(0)
    g, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    real = tl.load(position + r // heads) >= 0
    if SINKS:
        highest, weight = sinks_of(sinks, r % heads * GROUP + g, g < tl.where(real, GROUP, 0))
    for part in tl.static_range(PARTS):
        total, stop = tl.load(ends[part] + table_rows - 1), tl.load(ends[part] + r)
        start = tl.load(ends[part] + r - 1, mask=r > 0, other=0)
        share = tl.maximum((total + programs - 1) // programs, 1)
        first, behind = start // share, (stop + share - 1) // share
        behind = tl.where((stop > start) & real, behind, first)
        for program in range(first, behind):
            slot = (part * slots + program + r).to(tl.int64) * GROUP + g
            one = tl.load(lse + slot, mask=g < GROUP, other=float("-inf"))
            more = tl.load(found + slot[:, None] * DIM + d[None, :], mask=inside, other=0)
            higher = tl.maximum(highest, one)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            old, new = tl.exp2(highest - safe), tl.exp2(one - safe)
            sums = sums * old[:, None] + more * new[:, None]
            weight, highest = weight * old + new, higher
    if FRESH:
        b, h = r // heads, r % heads
        slot = tl.zeros([1], tl.int32)
        place = places_of(table, pitch, b, slot, slot == 0)
        held = (place >= 0) & (place <= tl.load(position + b))
        e = tl.arange(0, WIDTH)
        key = plain_tile(tokens[0], tokens[1], b, h, slot, held, e, KEY).to(tl.float32)
        value = plain_tile(tokens[2], tokens[3], b, h, slot, held, d, VALUE).to(tl.float32)
        rows = query_rows(q, q_strides, b, h, g, 0, KEY[1])[:, None] + e[None, :]
        there = (g < GROUP)[:, None] & (e < KEY[1])[None, :]
        query = tl.load(rows, mask=there, other=0).to(tl.float32)
        one = tl.sum(query * key, axis=1) * scale
        if CAPPED:
            one = bounded(one, softcap)
        one = tl.where(tl.sum(held.to(tl.int32), 0) > 0, one, float("-inf"))
        if WATCH:
            tl.store(logits + r.to(tl.int64) * GROUP + g, one, mask=g < GROUP)
        one = tl.where(real, one, float("-inf"))
        higher = tl.maximum(highest, one)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        old, new = tl.exp2(highest - safe), tl.exp2(one - safe)
        sums = sums * old[:, None] + value * new[:, None]
        weight, highest = weight * old + new, higher
    sums = sums / tl.where(weight > 0, weight, 1.0)[:, None]
    into = r.to(tl.int64) * GROUP + g
    tl.store(out + into[:, None] * DIM + d[None, :], sums.to(out.dtype.element_ty), mask=inside)
    natural = log_of(highest, weight) * 0.6931471805599453
    tl.store(lse_out + into, natural, mask=g < GROUP)


class Decoded(NamedTuple):
    """A decode step's result; `logits` of each part, if requested, are in base 2.

    Logits of slots past the end of a table row are undefined.
    """

    out: Float[Tensor, "B H G 1 Dv"]
    lse: Float[Tensor, "B H G"]
    logits: tuple[Float[Tensor, "R G _"], ...]


def decode(
    q: Float[Tensor, "B H G 1 D"],
    position: Int[Tensor, "B 1"],
    parts: Sequence[PartArguments],
    value_dim: int,
    scale: float,
    machine: Machine,
    softcap: float | None = None,
    sinks: Float[Tensor, "H G"] | None = None,
    out: Float[Tensor, "B H G 1 Dv"] | None = None,
    *,
    watched: bool = False,
) -> Decoded:
    """Compute attention over all parts, without synchronizing with the device.

    Args:
        q: queries in float32, float16 or bfloat16.
        position: positions of the queries, -1 for padding.
        parts: all tokens.
        value_dim: Dv.
        scale: the factor of the logits.
        machine: the device.
        softcap: the bound of the logits, if any.
        sinks: a logit of each query head without a value, if any.
        out: memory for the output, contiguous and in the dtype of the queries; None: new.
        watched: keep the logits, with the widths of the parts.
    """
    batch, heads, group, _, _ = q.shape
    table_rows, device = batch * heads, q.device
    q, position = adjacent(q), position.reshape(-1).contiguous()
    strides = strides_of(q)
    fresh = _alone(parts)
    stored = parts if fresh is None else parts[:-1]
    forms = [tiling(machine, "decode", part, q.dtype) for part in stored]
    # All parts have as many, which `combine_kernel` relies on.
    programs = machine.processors * min((form.programs for form in forms), default=1)
    slots = -(-(programs + table_rows) // 16) * 16  # so that every part begins at 16 bytes
    ends = _planned(stored, [form.block for form in forms], table_rows, device)
    found = torch.empty(len(stored), slots, group, value_dim, dtype=torch.float32, device=device)
    lse = torch.empty(len(stored), slots, group, dtype=torch.float32, device=device)
    rows = padded(group)
    bounds = scale * LOG2E, (softcap or 1.0) * LOG2E
    logits: list[Tensor] = []
    for i, (part, form) in enumerate(zip(stored, forms, strict=True)):
        kept = lse
        if watched:
            kept = q.new_empty((table_rows, group, part.width), dtype=torch.float32)
            logits.append(kept)
        with launching_on(q):
            decode_kernel[(programs,)](
                q,
                strides,
                position,
                found[i],
                lse[i],
                kept,
                part.width,
                ends[i],
                part.lengths(table_rows, device),
                part.tokens,
                part.table,
                part.pitch,
                table_rows,
                heads,
                *bounds,
                CAPPED=softcap is not None,
                PLANAR=planar(part, part.products(q.dtype, interpreted=machine.interpreted)),
                GROUP=group,
                ROWS=rows,
                BLOCK=form.block,
                WIDE=WIDE,
                WATCH=watched,
                VALUE=part.value,
                STAGES=form.stages,
                num_warps=form.warps,
                **part.constants(q.dtype, interpreted=machine.interpreted, asm=machine.asm),
            )
    if out is None or not out.is_contiguous() or out.dtype != q.dtype:
        out = torch.empty(batch, heads, group, 1, value_dim, dtype=q.dtype, device=device)
    total = torch.empty(batch, heads, group, dtype=torch.float32, device=device)
    if fresh is not None and watched:
        logits.append(torch.empty(table_rows, group, 1, dtype=torch.float32, device=device))
    with launching_on(q):
        combine_kernel[(table_rows,)](
            out,
            total,
            found,
            lse,
            ends or (position,),
            position,
            lse if sinks is None else sinks.contiguous(),
            q,
            strides,
            logits[-1] if watched and logits else lse,
            (q,) if fresh is None else fresh.tokens,
            position if fresh is None else fresh.table,
            0 if fresh is None else fresh.pitch,
            table_rows,
            heads,
            programs,
            slots,
            *bounds,
            PARTS=len(stored),
            FRESH=fresh is not None,
            WATCH=watched,
            CAPPED=softcap is not None,
            KEY=() if fresh is None else fresh.key,
            VALUE=() if fresh is None else fresh.value,
            WIDTH=1 if fresh is None else padded(fresh.key[1]),
            SINKS=sinks is not None,
            GROUP=group,
            ROWS=rows,
            DIM=value_dim,
            PADDED=padded(value_dim),
            num_warps=4,
        )
    return Decoded(out, total, tuple(logits))


def _alone(parts: Sequence[PartArguments]) -> PartArguments | None:
    """Return the last part if it is one dense token per sequence, as that of the step."""
    last = parts[-1] if parts else None
    if last is None or last.paged or last.width != 1 or last.key[1] > WIDEST_FRESH:
        return None
    return last


def _planned(
    parts: Sequence[PartArguments], blocks: Sequence[int], table_rows: int, device: torch.device
) -> tuple[Int[Tensor, " R"], ...]:
    """Count the tiles of all parts, unless a layer before has."""
    found = []
    for part, block in zip(parts, blocks, strict=True):
        tiles = part.tiles
        if tiles is None:
            tiles = TileCounts(part.lengths(table_rows, device)[None])
        if block not in tiles.counted:
            tiles.counted[block] = _counted(tiles.length, block)
        found.append(tiles.counted[block][tiles.layer])
    return tuple(found)


def _counted(length: Int[Tensor, "N R"], block: int) -> Int[Tensor, "N R"]:
    """Count the tiles of all layers, whose counts begin at multiples of 16 bytes."""
    layers, table_rows = length.shape
    ends = length.new_empty(layers, -(-table_rows // 4) * 4)
    with launching_on(length):
        plan_kernel[(layers,)](
            length, ends, table_rows, ends.stride(0), BLOCK=block, WIDE=WIDE, num_warps=4
        )
    return ends[:, :table_rows]
