"""The kernels of a decode step: evict victims, free and allocate pages, and insert tokens.

Each comment block below is one launch. `step` launches them and documents their invariants.
"""

from typing import no_type_check

import triton
import triton.language as tl

from kv_paging.gpu.bits import load_bits
from kv_paging.gpu.rows import beside, decode, entry_of, move, page_at, put, stride_at
from kv_paging.gpu.writing import total


@triton.jit
@no_type_check
def planned(
    choice,
    place,
    lengths,
    table_row,
    here,
    count,
    TIER: tl.constexpr,
    TIERS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the plan of a tier: slots and masks.

    Returns the victim's slot, whether it leaves, whether the candidate reuses its slot, whether the
    victim moves to a later tier, whether another victim arrives here, whether the candidate enters
    at a new slot, the length without the victim, the candidate's new slot, and whether the last
    page is emptied, the victim opens a page, and the candidate opens a page.
    """
    candidate = tl.load(choice[0] + table_row, here, other=255).to(tl.int32)
    victim = tl.load(choice[1] + table_row, here, other=255).to(tl.int32)
    target = tl.load(choice[2] + table_row, here, other=255).to(tl.int32)
    known = here & (victim < TIERS)
    slot = tl.load(place + victim.to(tl.int64) * count + table_row, known, other=-1)
    moves = known & (slot >= 0)
    leaves = moves & (victim == TIER)
    stays = here & (candidate == TIER)
    swap = leaves & stays
    gone = leaves & (candidate != TIER)
    goes = leaves & (target > TIER) & (target < TIERS)
    arrives = moves & (victim < TIER) & (target == TIER)
    enters = stays & (swap == 0)
    end = tl.load(lengths + table_row, here, other=0) - gone.to(tl.int32)
    entry = end + arrives.to(tl.int32)
    emptied = gone & (end % TOKENS == 0)
    opened = arrives & (end % TOKENS == 0)
    begun = enters & (entry % TOKENS == 0)
    return slot, gone, swap, goes, arrives, enters, end, entry, emptied, opened, begun


@triton.jit
@no_type_check
def keep_victim(page, row, goes, table_row, kept, LAYOUT: tl.constexpr):
    """Decode the victims that move, each to the entry of its table row."""
    wide = table_row.to(tl.int64)
    ALIGN: tl.constexpr = LAYOUT[4]
    decode(page, row, goes, kept[0], wide * LAYOUT[5][1], goes, LAYOUT[5], ALIGN)
    decode(page, row, goes, kept[1], wide * LAYOUT[6][1], goes, LAYOUT[6], ALIGN)
    if LAYOUT[1] >= 0:
        scores_fit: tl.constexpr = (ALIGN % 4 == 0) and (LAYOUT[1] % 4 == 0)
        score = load_bits(beside(page, row, LAYOUT[1]), goes, 4, scores_fit)
        tl.store(kept[2] + table_row, score, goes)
    if LAYOUT[2] >= 0:
        positions_fit: tl.constexpr = (ALIGN % 4 == 0) and (LAYOUT[2] % 4 == 0)
        position = load_bits(beside(page, row, LAYOUT[2]), goes, 4, positions_fit)
        tl.store(kept[3] + table_row, position, goes)


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
    """Evict in one tier; the program's counts are stored at `block` and `taker`."""
    tokens: tl.constexpr = LAYOUT[0]
    here_is = tl.program_id(0)
    every = tl.num_programs(0)
    lane = tl.arange(0, ROWS)
    table_row = here_is * ROWS + lane
    slot, gone, swap, goes, _arrives, _enters, end, _entry, emptied, opened, begun = planned(
        choice, place, lengths, table_row, table_row < count, count, TIER, TIERS, tokens
    )
    hole = page_at(data, pitch, table, width, table_row, slot // tokens, gone | swap, LAYOUT)
    if TIER + 1 < TIERS:
        if tl.max(goes.to(tl.int32), 0) > 0:
            keep_victim(hole, slot % tokens, goes, table_row, kept, LAYOUT)
        tl.debug_barrier()  # other threads may still read a victim that is overwritten below
    last = tl.load(entry_of(table, width, table_row, end // tokens, LAYOUT), gone, other=0)
    some = gone & (slot != end)
    if tl.max(some.to(tl.int32), 0) > 0:
        source = data + last.to(tl.int64) * pitch
        move(source, end % tokens, hole, slot % tokens, some, LAYOUT)
    tl.store(given + block.to(tl.int64) * ROWS + lane, tl.where(emptied, last, -1))
    tl.store(gives + block, tl.sum(emptied.to(tl.int32), 0))
    tl.store(takes + taker, tl.sum(opened.to(tl.int32), 0))
    tl.store(takes + taker + every, tl.sum(begun.to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["count", "first"],
    do_not_specialize_on_alignment=["candidate", "victim", "target", "place"],
)
@no_type_check
def leave_kernel(
    data,
    pitch,
    tables,
    widths,
    lengths,
    candidate,
    victim,
    target,
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
    """Decode the victims that move, close their gaps, and count released and allocated pages."""
    for tier in tl.static_range(len(LAYOUTS)):
        before = first + tier * tl.num_programs(0)
        leave_tier(
            data,
            pitch,
            tables[tier],
            widths[tier] // 16,
            lengths[tier],
            (candidate, victim, target),
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


@triton.jit(do_not_specialize=["nbytes", "size"])
@no_type_check
def give_kernel(
    data,
    pitch,
    nbytes,
    ids,
    start,
    count,
    after,
    size,
    given,
    gives,
    takes,
    POISON: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Append the emptied pages of some table rows to the free list."""
    block = tl.program_id(0)
    page = tl.load(given + block.to(tl.int64) * ROWS + tl.arange(0, ROWS))
    some = page >= 0
    rank = total(gives, block, MANY) + tl.cumsum(some.to(tl.int32), 0) - 1
    begin = tl.load(start)
    free = tl.load(count)
    tl.store(ids + (begin + free + rank) % size, page, some)
    if block == 0:  # a copy: programs of the next launch still read the list's start
        blocks = tl.num_programs(0)
        wanted = total(takes, 2 * blocks, MANY)
        tl.store(after, begin)
        tl.store(after + 1, (begin + wanted) % size)
        tl.store(after + 2, free + total(gives, blocks, MANY) - wanted)
    if POISON:
        target = data + tl.where(some, page, 0).to(tl.int64) * pitch
        for at in range(0, nbytes, MANY):
            byte = at + tl.arange(0, MANY)
            marked = some[:, None] & (byte < nbytes)[None, :]
            spoilt = tl.full((ROWS, MANY), 0xFF, tl.uint8)
            tl.store(target[:, None] + byte[None, :], spoilt, marked)


@triton.jit
@no_type_check
def taken(ids, begin, size, takes, before, some, MANY: tl.constexpr):
    """Return the free pages of the marked table rows, in order."""
    rank = total(takes, before, MANY) + tl.cumsum(some.to(tl.int32), 0) - 1
    return tl.load(ids + (begin + rank) % size, some, other=0)


@triton.jit
@no_type_check
def enter_tier(
    data,
    pitch,
    table,
    width,
    lengths,
    choice,
    place,
    count,
    kept,
    key,
    key_strides,
    value,
    value_strides,
    score,
    position,
    ids,
    begin,
    size,
    takes,
    taker,
    TIER: tl.constexpr,
    TIERS: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Insert tokens into one tier."""
    tokens: tl.constexpr = LAYOUT[0]
    table_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = table_row < count
    wide = table_row.to(tl.int64)
    slot, _gone, swap, _goes, arrives, enters, end, entry, _emptied, opened, begun = planned(
        choice, place, lengths, table_row, here, count, TIER, TIERS, tokens
    )
    new = taken(ids, begin, size, takes, taker, opened, MANY)
    newer = taken(ids, begin, size, takes, taker + tl.num_programs(0), begun, MANY)
    tl.store(entry_of(table, width, table_row, end // tokens, LAYOUT), new, opened)
    tl.store(entry_of(table, width, table_row, entry // tokens, LAYOUT), newer, begun)
    # Below, the table is read only where it was not written.
    if TIER > 0:  # noqa: SIM102 - a compile-time constant
        if tl.max(arrives.to(tl.int32), 0) > 0:
            old = arrives & (opened == 0)
            held = page_at(data, pitch, table, width, table_row, end // tokens, old, LAYOUT)
            put(
                tl.where(opened, data + new.to(tl.int64) * pitch, held),
                end % tokens,
                arrives,
                kept[0],
                wide * LAYOUT[5][1],
                1,
                kept[1],
                wide * LAYOUT[6][1],
                1,
                kept[2],
                kept[3],
                table_row,
                LAYOUT,
                ROWS,
            )
    some = enters | swap
    if tl.max(some.to(tl.int32), 0) > 0:
        where = tl.where(swap, slot, entry)
        follows = enters & opened & (begun == 0)  # in the page opened by the victim
        old = some & (begun == 0) & (follows == 0)
        held = page_at(data, pitch, table, width, table_row, where // tokens, old, LAYOUT)
        fresh = data + tl.where(begun, newer, new).to(tl.int64) * pitch
        put(
            tl.where(begun | follows, fresh, held),
            where % tokens,
            some,
            key,
            wide * stride_at(key_strides, 0, LAYOUT[5]),
            key_strides[1],
            value,
            wide * stride_at(value_strides, 0, LAYOUT[6]),
            value_strides[1],
            score,
            position,
            table_row,
            LAYOUT,
            ROWS,
        )
    tl.debug_barrier()  # all threads have read the lengths
    tl.store(lengths + table_row, entry + enters.to(tl.int32), here)


@triton.jit(
    do_not_specialize=["count", "size", "first"],
    do_not_specialize_on_alignment=[
        "candidate",
        "victim",
        "target",
        "place",
        "score",
        "position",
    ],
)
@no_type_check
def enter_kernel(
    data,
    pitch,
    tables,
    widths,
    lengths,
    candidate,
    victim,
    target,
    place,
    count,
    kept,
    key,
    key_strides,
    value,
    value_strides,
    score,
    position,
    ids,
    start,
    free,
    after,
    size,
    takes,
    first,
    LAYOUTS: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Assign pages to slots that open one, write the victims and the candidates, set lengths."""
    begin = tl.load(after)
    if tl.program_id(0) == 0:
        tl.store(start, tl.load(after + 1))
        tl.store(free, tl.load(after + 2))
    for tier in tl.static_range(len(LAYOUTS)):
        enter_tier(
            data,
            pitch,
            tables[tier],
            widths[tier] // 16,
            lengths[tier],
            (candidate, victim, target),
            place,
            count,
            kept,
            key,
            key_strides,
            value,
            value_strides,
            score,
            position,
            ids,
            begin,
            size,
            takes,
            2 * (first + tier * tl.num_programs(0)) + tl.program_id(0),
            tier,
            len(LAYOUTS),
            LAYOUTS[tier],
            ROWS,
            MANY,
        )
