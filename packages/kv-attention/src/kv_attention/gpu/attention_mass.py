"""Attention mass: the attention received by each token, without storing the attention matrix.

A decode step keeps its logits, and the mass follows from these and the log-sum-exp over all parts.
A prefill needs a second pass: a program loads a tile of keys, loops over the queries, recomputes
their attention from the log-sum-exp of the first pass, and sums it by column.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.gpu.arguments import LOG2E, PartArguments, adjacent
from kv_attention.gpu.decode import Decoded
from kv_attention.gpu.prefill import read_key
from kv_attention.gpu.tiles import logits_of, queries_of, query_rows
from kv_attention.gpu.tuning import Machine, tiling
from kv_attention.tokens import Attended
from kv_policy import Observe
from kv_policy.launching import UNIT, base_of, launching_on, strides_of

_LOG2E = tl.constexpr(LOG2E)
_UNIT = tl.constexpr(UNIT)
_STEP_BLOCK: Final = 1024  # tokens of a program of a decode step


@triton.jit
@no_type_check
def term_of(p, even, above, TERM: tl.constexpr):
    """Return the summand of the attention p: p, its square, its entropy, or whether it is large.

    `even` is the attention if it were uniform over every token up to the query.
    """
    if TERM == 1:
        return p * p
    if TERM == 2:
        return tl.where(p > 0, -p * tl.log2(tl.where(p > 0, p, 1.0)) / _LOG2E, 0.0)
    if TERM == 3:
        return (p > above * even).to(tl.float32)
    return p


@triton.jit
@no_type_check
def finite(lse):
    """Replace a log-sum-exp of -inf, of a query that sees no token, by 0."""
    return tl.where(lse == float("-inf"), 0.0, lse)


@triton.jit(
    do_not_specialize=["table_rows", "heads", "skip"],
    do_not_specialize_on_alignment=["position"],
)
@no_type_check
def mass_of_step_kernel(
    logits,
    lse,
    position,
    lengths,
    places,
    mass,
    seen,
    widths,
    table_rows,
    heads,
    above,
    skip,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    MEAN: tl.constexpr,
    TERMS: tl.constexpr,
    PAGED: tl.constexpr,
    FAR: tl.constexpr,
):
    """Sum the terms over a group, for all parts; the blocks of one follow those of another.

    Arguments are of each part: `mass` is [terms, table_rows, width], `seen` [table_rows, width],
    `logits` [table_rows, GROUP, width] in base 2, undefined past the end of a table row of pages;
    but `lse` [table_rows, GROUP] is natural. With FAR, tokens count from `skip` positions before
    the query on. `lengths` are storages with offsets, `places` have strides, too; these numbers and
    `widths` are multiplied by UNIT, see `launching`.
    """
    begin = 0
    for i in tl.static_range(PARTS):
        width = widths[i] // _UNIT
        blocks = (width + BLOCK - 1) // BLOCK
        block = tl.program_id(0) - begin
        if (block >= 0) & (block < blocks):
            mass_of_block(
                logits[i],
                lse,
                position,
                lengths[i][0] + lengths[i][1] // _UNIT,
                places[i][0] + places[i][1] // _UNIT,
                places[i][2] // _UNIT,
                places[i][3] // _UNIT,
                mass[i],
                seen[i],
                width,
                table_rows,
                heads,
                above,
                skip,
                block,
                GROUP,
                BLOCK,
                MAX,
                MEAN,
                TERMS,
                PAGED[i],
                FAR[i],
            )
        begin += blocks


@triton.jit
@no_type_check
def mass_of_block(
    logits,
    lse,
    position,
    length,
    places,
    place_row,
    place_head,
    mass,
    seen,
    width,
    table_rows,
    heads,
    above,
    skip,
    block,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    MEAN: tl.constexpr,
    TERMS: tl.constexpr,
    PAGED: tl.constexpr,
    FAR: tl.constexpr,
):
    """Sum the terms of a block of slots of a part."""
    r = tl.program_id(1)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    inside = slot < width
    b, h = r // heads, r % heads
    at = tl.load(position + b) + tl.zeros([BLOCK], tl.int64)
    first = logits + r.to(tl.int64) * GROUP * width + slot
    held = inside
    if PAGED:
        held = inside & (slot < tl.load(length + r))
    counts = tl.load(first, mask=held, other=float("-inf")) > float("-inf")
    counts = counts & (at >= 0)
    if FAR:
        mine = places + b.to(tl.int64) * place_row + h.to(tl.int64) * place_head
        place = tl.load(mine + slot, mask=counts, other=0)
        counts = counts & (at - place >= skip)
    even = 1.0 / tl.maximum(at + 1, 1).to(tl.float32)
    for i in tl.static_range(len(TERMS)):
        total = tl.zeros([BLOCK], tl.float32)
        for g in range(GROUP):
            logit = tl.load(first + g * width, mask=counts, other=float("-inf"))
            whole = finite(tl.load(lse + r * GROUP + g)) * _LOG2E
            p = tl.where(counts, tl.exp2(logit - whole), 0.0)
            term = term_of(p, even, above, TERMS[i])
            total = tl.maximum(total, term) if MAX else total + term
        if MEAN:
            total = total / GROUP
        into = mass + (i * table_rows + r).to(tl.int64) * width + slot
        tl.store(into, tl.where(counts, total, 0.0), mask=inside)
    tl.store(seen + r.to(tl.int64) * width + slot, counts.to(tl.int32), mask=inside)


@triton.jit
@no_type_check
def attention_of(
    q,
    q_strides,
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
    more,
    k_scale,
    k_zero,
    d,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    AS: tl.constexpr,
    REST: tl.constexpr,
):
    """Return the attention of one head's queries to a tile of keys: [queries, BLOCK]."""
    rows = query_rows(q, q_strides, b, h, g, query.to(tl.int64), KEY[1])[:, None]
    level, more_level, back, whole = queries_of(rows, at >= 0, scale, d, KEY, AS, REST)
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
        "ieee",
        REST,
        CAPPED,
    )
    mine = lse + (r.to(tl.int64) * GROUP + g) * queries + query
    found = finite(tl.load(mine, mask=at >= 0, other=0)) * _LOG2E
    return tl.where(sees, tl.exp2(logits - found[:, None]), 0.0)


@triton.jit(
    do_not_specialize=[
        "pitch",
        "place_row",
        "place_head",
        "width",
        "queries",
        "table_rows",
        "heads",
        "skip",
    ],
    do_not_specialize_on_alignment=["position", "lse", "length", "table", "places"],
)
@no_type_check
def mass_of_pass_kernel(
    q,
    q_strides,
    position,
    lse,
    length,
    tokens,
    table,
    pitch,
    places,
    place_row,
    place_head,
    mass,
    seen,
    width,
    queries,
    table_rows,
    heads,
    scale,
    softcap,
    above,
    skip,
    CAPPED: tl.constexpr,
    PAGED: tl.constexpr,
    GROUP: tl.constexpr,
    MODE: tl.constexpr,
    TERMS: tl.constexpr,
    FAR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AS: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    KEY: tl.constexpr,
    PAGE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Sum each term over queries and a group: `mass` is [terms, table_rows, width].

    `lse` is [table_rows, GROUP, queries] in natural logs, `position` [B, queries], ascending except
    for padding at -1. MODE: 0 sums over the group, 1 averages, 2 takes each query's maximum, 3 the
    maximum of the heads' sums. `seen` [table_rows, width] counts queries.
    """
    r = tl.program_id(1)
    b, h = r // heads, r % heads
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED[0])
    count = tl.load(length + r)
    key, more, k_scale, k_zero, held, page, _ = read_key(
        tokens, table, pitch, r, b, h, slot, count, d, PAGED, KEY, PAGE, BLOCK, AS[0], REST, ASM
    )
    nearest = tl.zeros([BLOCK], tl.int64)  # the first query position that counts for a token
    if FAR:
        mine = places + b.to(tl.int64) * place_row + h.to(tl.int64) * place_head
        place = tl.load(mine + slot, mask=held, other=0)
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
                        these = tl.sum(sees.to(tl.int32), 0)
                        counted += tl.where(outer == 0, these, 0)
                    largest = tl.zeros([ROWS, BLOCK], tl.float32)
                    for inner in range(GROUP if MODE == 2 else 1):
                        p = attention_of(
                            q,
                            q_strides,
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
                            more,
                            k_scale,
                            k_zero,
                            d,
                            scale,
                            softcap,
                            CAPPED,
                            GROUP,
                            KEY,
                            AS[0],
                            REST,
                        )
                        largest = tl.maximum(largest, term_of(p, even, above, TERMS[i]))
                    sums += tl.sum(largest, 0)
            best = tl.maximum(best, sums) if MODE == 3 else best + sums
        if MODE == 1:
            best = best / GROUP
        tl.store(mass + (i * table_rows.to(tl.int64) * width + into), best, mask=slot < width)
    tl.store(seen + into, counted, mask=slot < width)


TERMS: Final = {"squares": 1, "entropy": 2}
MODES: Final = {"sum": 0, "mean": 1, "max": 2, "max-of-sums": 3}
Places: TypeAlias = Int[Tensor, "B _ _"] | None


def mass_of_step(
    done: Decoded,
    position: Int[Tensor, "B 1"],
    parts: Sequence[PartArguments],
    places: Sequence[Places],
    what: Observe,
) -> Attended:
    """Sum the attention mass of a decode step from its logits."""
    if what.last == 0:
        return Attended(done.out)
    batch, heads, group = done.lse.shape
    sums = [_sums(part, batch, heads, what, done.lse.device) for part in parts]
    found = [(mass, seen) for mass, seen, _ in sums]
    some = [i for i, part in enumerate(parts) if part.width]
    if not some:
        return _attended(done.out, found, what)
    at = [_placed(parts[i], places[i]) for i in some]
    widths = [parts[i].width for i in some]
    blocks = sum(triton.cdiv(width, _STEP_BLOCK) for width in widths)
    with launching_on(done.lse):
        mass_of_step_kernel[(blocks, batch * heads)](
            tuple(done.logits[i] for i in some),
            done.lse,
            position.reshape(-1).contiguous(),
            tuple(base_of(found[i][1] if (x := parts[i].length) is None else x) for i in some),
            tuple((*base_of(place), UNIT * row, UNIT * head) for place, row, head in at),
            tuple(found[i][0] for i in some),
            tuple(found[i][1] for i in some),
            tuple(UNIT * width for width in widths),
            batch * heads,
            heads,
            float(what.above or 0),
            what.skip,
            PARTS=len(some),
            GROUP=group,
            BLOCK=_STEP_BLOCK,
            MAX=what.group in ("max", "max-of-sums"),
            MEAN=what.group == "mean",
            TERMS=sums[0][2],
            PAGED=tuple(parts[i].paged for i in some),
            FAR=tuple(what.skip > int(parts[i].paged) for i in some),
            num_warps=4,
        )
    return _attended(done.out, found, what)


def mass_of_pass(
    rows: Float[Tensor, "B H G w D"],
    position: Int[Tensor, "B w"],
    lse: Float[Tensor, "B H G w"],
    out: Float[Tensor, "B H G L Dv"],
    parts: Sequence[PartArguments],
    places: Sequence[Places],
    scale: float,
    machine: Machine,
    what: Observe,
    softcap: float | None = None,
) -> Attended:
    """Recompute and sum the attention of the observed queries, tile by tile.

    Args:
        rows: the observed queries.
        position: their positions, ascending, -1 for a query that does not count.
        lse: their log-sum-exp over all parts.
        out: the output of the pass.
        parts: all tokens, with their widths.
        places: positions of the tokens of each part.
        scale: the factor of the logits.
        machine: the device.
        what: the observation; its `last` has been applied.
        softcap: the bound of the logits, if any.
    """
    rows = adjacent(rows)
    batch, heads, group, queries, _ = rows.shape
    found = []
    for part, place in zip(parts, places, strict=True):
        mass, seen, terms = _sums(part, batch, heads, what, rows.device)
        if part.width:
            form = tiling(machine, "attention_mass", part, rows.dtype)
            with launching_on(rows):
                mass_of_pass_kernel[(triton.cdiv(part.width, form.block), batch * heads)](
                    rows,
                    strides_of(rows),
                    position.contiguous(),
                    lse.contiguous(),
                    part.lengths(batch * heads, rows.device),
                    part.tokens,
                    part.table,
                    part.pitch,
                    *_placed(part, place),
                    mass,
                    seen,
                    part.width,
                    queries,
                    batch * heads,
                    heads,
                    scale * LOG2E,
                    (softcap or 1.0) * LOG2E,
                    float(what.above or 0),
                    what.skip,
                    CAPPED=softcap is not None,
                    GROUP=group,
                    MODE=MODES[what.group],
                    TERMS=terms,
                    FAR=what.skip > int(part.paged),
                    ROWS=_rows(form.queries, what.last),
                    BLOCK=form.block,
                    num_warps=form.warps,
                    **part.constants(rows.dtype, interpreted=machine.interpreted, asm=machine.asm),
                )
        found.append((mass, seen))
    return _attended(out, found, what)


def _sums(
    part: PartArguments, batch: int, heads: int, what: Observe, device: torch.device
) -> tuple[Float[Tensor, "terms B H W"], Int[Tensor, "B H W"], tuple[int, ...]]:
    """Allocate the sums of a part, and return the kernels' numbers of the terms."""
    first = 3 if what.above is not None else int(what.power == 2)
    terms = (first, *(TERMS[name] for name in sorted(what.also)))
    mass = torch.empty(len(terms), batch, heads, part.width, dtype=torch.float32, device=device)
    seen = torch.empty(batch, heads, part.width, dtype=torch.int32, device=device)
    return mass, seen, terms


def _rows(most: int, last: int | None) -> int:
    """Return the queries of a tile: no more than are observed, however many a chunk has."""
    return most if last is None else max(16, min(most, triton.next_power_of_2(last)))


def _placed(part: PartArguments, place: Places) -> tuple[Tensor, int, int]:
    """Return the positions of a part's tokens with their strides; unused ones are arbitrary."""
    if place is None:
        return part.table, 0, 0
    place = adjacent(place)
    return place, place.stride(0), place.stride(1) if place.shape[1] > 1 else 0


def _attended(out: Tensor, found: Sequence[tuple[Tensor, Tensor]], what: Observe) -> Attended:
    names = sorted(what.also)
    return Attended(
        out,
        tuple(mass[0] for mass, _ in found),
        tuple(seen for _, seen in found),
        tuple({name: mass[1 + i] for i, name in enumerate(names)} for mass, _ in found),
    )
