"""Reads and writes of tokens and scores in pages, and the search for the lowest score."""

from typing import Final, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_paging.gpu.bits import load_bits, store_bits
from kv_paging.gpu.numbers import Layout, blocks, numbers_of, rows
from kv_paging.gpu.rows import beside, decode, page_at
from kv_paging.gpu.writing import scores, table_of
from kv_paging.table import pages_for
from kv_paging.tokens import Stored, VectorNames
from kv_policy import PagedTokens
from kv_policy.launching import launching_on

SLOTS: Final = 1024  # scores per program and iteration
_DTYPES: Final = (torch.float32, torch.float32, torch.float16, torch.bfloat16)  # by kind


@triton.jit
@no_type_check
def number_at(page, row, some, OFFSET: tl.constexpr, LAYOUT: tl.constexpr):
    """Load the bits of scores, or the positions, of the marked tokens."""
    aligned: tl.constexpr = (LAYOUT[4] % 4 == 0) and (OFFSET % 4 == 0)
    return load_bits(beside(page, row, OFFSET), some, 4, aligned)


@triton.jit(
    do_not_specialize=["width", "slots", "count"],
    do_not_specialize_on_alignment=["table", "lengths", "table_rows"],
)
@no_type_check
def read_kernel(
    data,
    pitch,
    table,
    width,
    lengths,
    table_rows,
    start,
    slots,
    held,
    score,
    position,
    key,
    value,
    count,
    LAYOUT: tl.constexpr,
    HOLES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Read `ROWS` of all slots, ordered by table row; they begin at `start`, or at 0."""
    tokens: tl.constexpr = LAYOUT[0]
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = place < count.to(tl.int64) * slots
    which = (place // slots).to(tl.int32)
    slot = (place % slots).to(tl.int32)
    if start is not None:
        slot += tl.load(start + which, there, other=0).to(tl.int32)
    table_row = tl.load(table_rows + which, there, other=0)
    some = there & (slot < tl.load(lengths + table_row, there, other=0))
    page = page_at(data, pitch, table, width, table_row, slot // tokens, some, LAYOUT)
    row = slot % tokens
    if LAYOUT[2] >= 0:
        number = number_at(page, row, some, LAYOUT[2], LAYOUT)
        if HOLES:
            some = some & (number >= 0)
        tl.store(position + place, tl.where(some, number, -1).to(tl.int64), there)
    tl.store(held + place, some.to(tl.uint8), there)
    if LAYOUT[1] >= 0:
        bits = number_at(page, row, some, LAYOUT[1], LAYOUT)
        tl.store(score + place, bits.to(tl.float32, bitcast=True), there)
    if key is not None:
        decode(page, row, some, key, place * LAYOUT[5][1], there, LAYOUT[5], LAYOUT[4])
    if value is not None:
        decode(page, row, some, value, place * LAYOUT[6][1], there, LAYOUT[6], LAYOUT[4])


@triton.jit
@no_type_check
def to_page_ends(
    data,
    pitch,
    table,
    width,
    lengths,
    table_rows,
    slots,
    count,
    LAYOUT: tl.constexpr,
    MANY: tl.constexpr,
):
    """Locate `MANY` of all slots, including those up to the end of each row's last page.

    Returns the index into `table_rows`, the slot, its page, its row there, whether it holds a
    token, and whether a page of the table row contains it; pages past the last of `slots` are
    skipped.
    """
    tokens: tl.constexpr = LAYOUT[0]
    every = (slots + tokens - 1) // tokens * tokens
    place = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    there = place < count.to(tl.int64) * every
    which = place // every
    slot = (place % every).to(tl.int32)
    table_row = tl.load(table_rows + which, there, other=0)
    length = tl.load(lengths + table_row, there, other=0)
    some = there & (slot < (tl.minimum(length, slots) + tokens - 1) // tokens * tokens)
    page = page_at(data, pitch, table, width, table_row, slot // tokens, some, LAYOUT)
    return which, slot, page, slot % tokens, some & (slot < length), some


@triton.jit
@no_type_check
def put_scores(page, row, number, some, LAYOUT: tl.constexpr):
    """Store the scores of the marked tokens."""
    aligned: tl.constexpr = (LAYOUT[4] % 4 == 0) and (LAYOUT[1] % 4 == 0)
    bits = number.to(tl.int32, bitcast=True)
    store_bits(beside(page, row, LAYOUT[1]), bits, some, 4, aligned)


@triton.jit(
    do_not_specialize=["width", "slots", "count"],
    do_not_specialize_on_alignment=["table", "lengths", "table_rows", "score"],
)
@no_type_check
def rescore_kernel(
    data,
    pitch,
    table,
    width,
    lengths,
    table_rows,
    score,
    slots,
    count,
    LAYOUT: tl.constexpr,
    HOLES: tl.constexpr,
    MANY: tl.constexpr,
):
    """Store the scores of `MANY` of all slots, to the end of each table row's last page."""
    which, slot, page, row, held, some = to_page_ends(
        data, pitch, table, width, lengths, table_rows, slots, count, LAYOUT, MANY
    )
    number = tl.load(score + which * slots + slot, some & (slot < slots), other=0.0)
    if HOLES:
        position = number_at(page, row, some, LAYOUT[2], LAYOUT)
        number = tl.where(held & (position >= 0), number, float("inf"))
    put_scores(page, row, number, some, LAYOUT)


@triton.jit(
    do_not_specialize=["width", "slots", "count"],
    do_not_specialize_on_alignment=["table", "lengths", "table_rows", "until"],
)
@no_type_check
def weakest_kernel(
    data,
    pitch,
    table,
    width,
    lengths,
    table_rows,
    slots,
    until,
    score,
    found,
    count,
    LAYOUT: tl.constexpr,
    HOLES: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Find the lowest score per table row, in torch's order: NaN is the lowest."""
    tokens: tl.constexpr = LAYOUT[0]
    which = tl.program_id(0) * TABLE_ROWS + tl.arange(0, TABLE_ROWS)
    here = which < count
    table_row = tl.load(table_rows + which, here, other=0)
    end = tl.minimum(tl.load(lengths + table_row, here, other=0), slots)
    best = tl.full((TABLE_ROWS,), 0x7FFFFFFFFFFFFFFF, tl.int64)
    bound = best
    if until is not None:
        bound = tl.load(until + which, here, other=0).to(tl.int64)
    for first in range(0, tl.max(end, 0), MANY):
        slot = first + tl.arange(0, MANY)[None, :]
        some = slot < end[:, None]
        column = slot // tokens
        page = page_at(data, pitch, table, width, table_row[:, None], column, some, LAYOUT)
        if LAYOUT[2] >= 0 and (HOLES or until is not None):
            place = number_at(page, slot % tokens, some, LAYOUT[2], LAYOUT)
            if HOLES:
                some = some & (place >= 0)
            if until is not None:
                some = some & (place.to(tl.int64) < bound[:, None])
        bits = number_at(page, slot % tokens, some, LAYOUT[1], LAYOUT)
        size = bits & 0x7FFFFFFF
        order = tl.where(bits < 0, -size, size)  # both signed zeros are 0
        order = tl.where(size > 0x7F800000, -0x7FFFFFFF, order)
        # Find the first of equal scores by one minimum over (score, slot).
        both = (order.to(tl.int64) << 32) + slot
        best = tl.minimum(best, tl.min(tl.where(some, both, 0x7FFFFFFFFFFFFFFF), 1))
    there = best != 0x7FFFFFFFFFFFFFFF
    slot = (best & 0x7FFFFFFF).to(tl.int32)
    page = page_at(data, pitch, table, width, table_row, slot // tokens, there, LAYOUT)
    bits = number_at(page, slot % tokens, there, LAYOUT[1], LAYOUT)
    number = tl.where(there, bits, 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(score + which, number, here)
    tl.store(found + which, tl.where(there, slot, -1).to(tl.int64), here)


def read(
    pages: PagedTokens,
    table_rows: Tensor,
    slots: int,
    vectors: VectorNames,
    start: Tensor | None = None,
) -> Stored:
    """See `PageKernels.read`; one launch."""
    layout, count = numbers_of(pages), len(table_rows)
    size = rows(layout)

    def room(some: bool, dtype: torch.dtype, *dim: int) -> Tensor | None:
        shape = (count, slots, *dim)
        return torch.empty(shape, dtype=dtype, device=pages.data.device) if some else None

    held = torch.empty(count, slots, dtype=torch.bool, device=pages.data.device)
    score = room(pages.layout.scores, torch.float32)
    position = room(pages.layout.positions, torch.int64)
    key = room("keys" in vectors, *_vector(layout, 5))
    value = room("values" in vectors, *_vector(layout, 6))
    with launching_on(pages.data):
        read_kernel[(blocks(count * slots, size),)](
            *tier_of(pages),
            table_rows.contiguous(),
            None if start is None else start.contiguous(),
            slots,
            held.view(torch.uint8),
            score,
            position,
            key,
            value,
            count,
            layout,
            pages.holes,
            size,
        )
    return Stored(held, score, position, key, value)


def rescore(pages: PagedTokens, table_rows: Tensor, score: Tensor) -> None:
    """See `PageKernels.rescore`; one launch."""
    slots = score.shape[1]
    holes = pages.holes and pages.layout.positions
    with launching_on(pages.data):
        rescore_kernel[over_page_ends(pages, table_rows, slots)](
            *tier_of(pages),
            table_rows.contiguous(),
            scores(score),
            slots,
            len(table_rows),
            numbers_of(pages),
            holes,
            SLOTS,
        )


def weakest(
    pages: PagedTokens, table_rows: Tensor, slots: int, until: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `PageKernels.weakest`; one launch."""
    score = torch.empty(len(table_rows), dtype=torch.float32, device=pages.data.device)
    found = torch.empty(len(table_rows), dtype=torch.int64, device=pages.data.device)
    with launching_on(pages.data):
        weakest_kernel[(len(table_rows),)](
            *tier_of(pages),
            table_rows.contiguous(),
            slots,
            None if until is None else until.contiguous(),
            score,
            found,
            len(table_rows),
            numbers_of(pages),
            pages.holes,
            1,
            SLOTS,
        )
    return score, found


def over_page_ends(pages: PagedTokens, table_rows: Tensor, slots: int) -> tuple[int]:
    """Return the grid of a kernel that uses `to_page_ends`."""
    tokens = pages.layout.tokens
    return (blocks(len(table_rows) * pages_for(slots, tokens) * tokens, SLOTS),)


def tier_of(pages: PagedTokens) -> tuple[Tensor, int, Tensor, int, Tensor]:
    """Return data, pitch of pages, table, width and lengths, as kernel arguments."""
    length = pages.length[:, 0].contiguous()
    return pages.data, pages.data.stride(0), table_of(pages), pages.table.shape[-1], length


def _vector(layout: Layout, half: int) -> tuple[torch.dtype, int]:
    kind, dim, *_ = layout[5] if half == 5 else layout[6]
    return _DTYPES[kind], dim
