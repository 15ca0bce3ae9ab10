"""The first launch of a step: victims are decoded, gaps are filled, and pages are counted."""

from typing import no_type_check

import triton
import triton.language as tl

from kv_paging.gpu.bits import load_bits
from kv_paging.gpu.planning import planned
from kv_paging.gpu.rows import beside, decode, entry_of, move, page_at


@triton.jit
@no_type_check
def keep_victim(page, row, goes, stream, kept, LAYOUT: tl.constexpr):
    """Decode the victims that move, one to each stream's place."""
    wide = stream.to(tl.int64)
    ALIGN: tl.constexpr = LAYOUT[4]
    decode(page, row, goes, kept[0], wide * LAYOUT[5][1], goes, LAYOUT[5], ALIGN)
    decode(page, row, goes, kept[1], wide * LAYOUT[6][1], goes, LAYOUT[6], ALIGN)
    if LAYOUT[1] >= 0:
        scores_fit: tl.constexpr = (ALIGN % 4 == 0) and (LAYOUT[1] % 4 == 0)
        score = load_bits(beside(page, row, LAYOUT[1]), goes, 4, scores_fit)
        tl.store(kept[2] + stream, score, goes)
    if LAYOUT[2] >= 0:
        positions_fit: tl.constexpr = (ALIGN % 4 == 0) and (LAYOUT[2] % 4 == 0)
        position = load_bits(beside(page, row, LAYOUT[2]), goes, 4, positions_fit)
        tl.store(kept[3] + stream, position, goes)


@triton.jit
@no_type_check
def leave_tier(
    data,
    pitch,
    table,
    width,
    lengths,
    choice,
    place,
    count,
    kept,
    given,
    gives,
    takes,
    block,
    taker,
    TIER: tl.constexpr,
    TIERS: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What a program does to one tier; `block` and `taker` are where its counts go."""
    tokens: tl.constexpr = LAYOUT[0]
    here_is = tl.program_id(0)
    every = tl.num_programs(0)
    lane = tl.arange(0, ROWS)
    stream = here_is * ROWS + lane
    slot, gone, swap, goes, _arrives, _enters, end, _entry, emptied, opened, begun = planned(
        choice, place, lengths, stream, stream < count, count, TIER, TIERS, tokens
    )
    hole = page_at(data, pitch, table, width, stream, slot // tokens, gone | swap, LAYOUT)
    if TIER + 1 < TIERS:
        if tl.max(goes.to(tl.int32), 0) > 0:
            keep_victim(hole, slot % tokens, goes, stream, kept, LAYOUT)
        tl.debug_barrier()  # other threads may still read a victim that is overwritten below
    last = tl.load(entry_of(table, width, stream, end // tokens, LAYOUT), gone, other=0)
    some = gone & (slot != end)
    if tl.max(some.to(tl.int32), 0) > 0:
        source = data + last.to(tl.int64) * pitch
        move(source, end % tokens, hole, slot % tokens, some, LAYOUT)
    tl.store(given + block.to(tl.int64) * ROWS + lane, tl.where(emptied, last, -1))
    tl.store(gives + block, tl.sum(emptied.to(tl.int32), 0))
    tl.store(takes + taker, tl.sum(opened.to(tl.int32), 0))
    tl.store(takes + taker + every, tl.sum(begun.to(tl.int32), 0))


@triton.jit
@no_type_check
def leave_kernel(
    data,
    pitch,
    tables,
    widths,
    lengths,
    choice,
    place,
    count,
    kept,
    given,
    gives,
    takes,
    first,
    LAYOUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decode the victims that move, close their gaps, and count pages that come and go."""
    for tier in tl.static_range(len(LAYOUTS)):
        before = first + tier * tl.num_programs(0)
        leave_tier(
            data,
            pitch,
            tables[tier],
            widths[tier],
            lengths[tier],
            choice,
            place,
            count,
            kept,
            given,
            gives,
            takes,
            before + tl.program_id(0),
            2 * before + tl.program_id(0),
            tier,
            len(LAYOUTS),
            LAYOUTS[tier],
            ROWS,
        )
