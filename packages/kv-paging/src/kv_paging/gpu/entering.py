"""The third launch of a step: streams take pages, and tokens enter."""

from typing import no_type_check

import triton
import triton.language as tl

from kv_paging.gpu.giving import taken
from kv_paging.gpu.planning import planned
from kv_paging.gpu.rows import entry_of, page_at, put


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
    """What a program does to one tier."""
    tokens: tl.constexpr = LAYOUT[0]
    stream = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = stream < count
    wide = stream.to(tl.int64)
    slot, _gone, swap, _goes, arrives, enters, end, entry, _emptied, opened, begun = planned(
        choice, place, lengths, stream, here, count, TIER, TIERS, tokens
    )
    new = taken(ids, begin, size, takes, taker, opened, MANY)
    newer = taken(ids, begin, size, takes, taker + tl.num_programs(0), begun, MANY)
    tl.store(entry_of(table, width, stream, end // tokens, LAYOUT), new, opened)
    tl.store(entry_of(table, width, stream, entry // tokens, LAYOUT), newer, begun)
    # From here on the table is read only where it was not written.
    if TIER > 0:  # noqa: SIM102 - known when it is compiled
        if tl.max(arrives.to(tl.int32), 0) > 0:
            old = arrives & (opened == 0)
            held = page_at(data, pitch, table, width, stream, end // tokens, old, LAYOUT)
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
                stream,
                LAYOUT,
                ROWS,
            )
    some = enters | swap
    if tl.max(some.to(tl.int32), 0) > 0:
        where = tl.where(swap, slot, entry)
        follows = enters & opened & (begun == 0)  # in the page that the victim begins
        old = some & (begun == 0) & (follows == 0)
        held = page_at(data, pitch, table, width, stream, where // tokens, old, LAYOUT)
        fresh = data + tl.where(begun, newer, new).to(tl.int64) * pitch
        put(
            tl.where(begun | follows, fresh, held),
            where % tokens,
            some,
            key,
            wide * key_strides[0],
            key_strides[1],
            value,
            wide * value_strides[0],
            value_strides[1],
            score,
            position,
            stream,
            LAYOUT,
            ROWS,
        )
    tl.debug_barrier()  # all threads have read the lengths
    tl.store(lengths + stream, entry + enters.to(tl.int32), here)


@triton.jit
@no_type_check
def enter_kernel(
    data,
    pitch,
    tables,
    widths,
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
    """Give pages to slots that begin one, write the victims and the candidates, set lengths."""
    begin = tl.load(after)
    if tl.program_id(0) == 0:
        tl.store(start, tl.load(after + 1))
        tl.store(free, tl.load(after + 2))
    for tier in tl.static_range(len(LAYOUTS)):
        enter_tier(
            data,
            pitch,
            tables[tier],
            widths[tier],
            lengths[tier],
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
            2 * (first + tier * tl.num_programs(0)) + tl.program_id(0),
            tier,
            len(LAYOUTS),
            LAYOUTS[tier],
            ROWS,
            MANY,
        )
