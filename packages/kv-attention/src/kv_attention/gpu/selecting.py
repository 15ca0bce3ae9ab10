"""The pages that a decode step reads, selected in two launches, of which the host learns nothing.

The first launch bounds the logits of every query in every page. Where pages have codes of their
keys it computes the largest logits instead, after one that rotates queries. In the last launch a
program takes a table row: it scores the row's pages, finds the lowest score that is read by the
digits of scores, the highest first, and writes the page numbers in their order. Nothing is sorted.
"""

from dataclasses import replace
from typing import Final, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float16, Float32, UInt8
from torch import Tensor
from torch.nn.functional import pad

from kv_attention.gpu.arguments import adjacent
from kv_attention.gpu.tiles import query_rows
from kv_attention.page_bounds import PageBounds
from kv_attention.page_selection import known_longest
from kv_policy import PagedTokens, PageReading
from kv_policy.key_codes import code_rotation, code_rows
from kv_policy.launching import base_of, launching_on, strides_of
from kv_policy.reading import NEAR

UNIT: Final = tl.constexpr(8)  # numbers of bounds in pages, whose addresses are multiples of it
LINE: Final = tl.constexpr(16)  # dimensions of a row of codes
LEAST: Final = 16  # rows and columns of a product of tiles
SLOTS: Final = 64  # tokens of a tile of codes
MANY: Final = 1024  # pages per iteration, once a page has a score
TILE: Final = 4096  # numbers of a tile of bounds, or of a group's logits


@triton.jit(
    do_not_specialize=["columns", "before", "pitch", "heads", "width"],
    do_not_specialize_on_alignment=["count", "table"],
)
@no_type_check
def bound_logits_kernel(
    q,
    q_strides,
    both,
    before,
    pitch,
    table,
    width,
    count,
    logits,
    columns,
    heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Bound the logits of a group of queries in `BLOCK` pages of a table row.

    `both` begin with `before` other pages, so that several numbers are loaded at once in any layer,
    and then are [table_rows, pitch, 2 * DIM]. If PAGED, they are `pitch` * UNIT numbers apart by
    page of the `table`, after `before` * UNIT others. `logits` are [table_rows, GROUP, columns];
    those of pages without bounds are left as they are.
    """
    r = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = tl.minimum(tl.load(count + r).to(tl.int32), columns)
    if tl.program_id(1) * BLOCK < known:
        d = tl.arange(0, PADDED)
        there = (column < known)[:, None] & (d < DIM)[None, :]
        if PAGED:
            row = both + before.to(tl.int64) * UNIT
            mine = table + r.to(tl.int64) * width
            page = page_at(mine, width, column, column < known, REVERSE)
            at = (page.to(tl.int64) * pitch * UNIT)[:, None] + d[None, :]
        else:
            row = both + (before + r.to(tl.int64) * pitch) * (2 * DIM)
            at = column.to(tl.int64)[:, None] * (2 * DIM) + d[None, :]
        high = tl.load(row + at, mask=there, other=0).to(tl.float32)
        low = tl.load(row + at + DIM, mask=there, other=0).to(tl.float32)
        for g in range(GROUP):
            rows = query_rows(q, q_strides, r // heads, r % heads, g, 0, DIM)
            x = tl.load(rows + d, mask=d < DIM, other=0).to(tl.float32)[None, :]
            # Not their maximum: a page of empty slots has no largest number.
            found = tl.sum(tl.where(x > 0, high, low) * x, axis=1)
            into = logits + (r.to(tl.int64) * GROUP + g) * columns
            tl.store(into + column, found, mask=column < known)


@triton.jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["rotation"])
@no_type_check
def rotate_kernel(
    q,
    q_strides,
    rotation,
    rotated,
    step,
    heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    """Rotate LINE queries of a table row, and round them to -127 to 127 times a step of each.

    `rotated` are [table_rows, ROWS, WIDTH], with zeros past DIM, and `step` is [table_rows, ROWS].
    The step of a query with an element that is not finite is not a number, or infinite.
    """
    r, e = tl.program_id(0), tl.arange(0, LINE)
    g = tl.program_id(1) * LINE + e
    rows = query_rows(q, q_strides, r // heads, r % heads, g, 0, DIM)
    most, strange = tl.zeros([LINE], tl.float32), tl.zeros([LINE], tl.int32)
    lines = (DIM + LINE - 1) // LINE
    for line in range(lines):
        found = rotated_columns(rows, g < GROUP, rotation, e + line * LINE, DIM, PART)
        most = tl.maximum(most, tl.max(tl.abs(found), 1))
        strange = tl.maximum(strange, tl.max((found != found).to(tl.int32), 1))
    most = tl.where(strange > 0, float("nan"), most)
    tl.store(step + r * ROWS + g, most / 127.0)
    some = most > 1e-30  # smaller queries are zero
    up = tl.where(some, 127.0 / tl.where(some, most, 1.0), 0.0)
    for line in range(lines):
        found = rotated_columns(rows, g < GROUP, rotation, e + line * LINE, DIM, PART) * up[:, None]
        found = found + 12582912.0 - 12582912.0  # to integers, ties to even
        at = (r * ROWS + g)[:, None] * WIDTH + e[None, :] + line * LINE
        tl.store(rotated + at, found.to(tl.float16))


@triton.jit
@no_type_check
def rotated_columns(rows, some, rotation, j, DIM: tl.constexpr, PART: tl.constexpr):
    """Multiply queries, by address, by columns j of a rotation, PART dimensions at a time."""
    found = tl.zeros([LINE, LINE], tl.float32)
    for at in range(0, DIM, PART):
        d = at + tl.arange(0, PART)
        x = tl.load(rows[:, None] + d[None, :], mask=some[:, None] & (d < DIM)[None, :], other=0)
        there = (d < DIM)[:, None] & (j < DIM)[None, :]
        matrix = tl.load(rotation + d[:, None] * DIM + j[None, :], mask=there, other=0)
        found += tl.dot(x.to(tl.float32), matrix, input_precision="ieee")
    return found


@triton.jit
@no_type_check
def word_at(place, some, ALIGNED: tl.constexpr):
    """Load four bytes from each address into an int32; 0 if masked."""
    if ALIGNED:
        return tl.load(place.to(tl.pointer_type(tl.int32)), mask=some, other=0)
    else:
        word = tl.load(place, mask=some, other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            more = tl.load(place + byte, mask=some, other=0).to(tl.int32)
            word = word | (more << (8 * byte))
        return word


@triton.jit(
    do_not_specialize=["columns", "before", "pitch", "width"],
    do_not_specialize_on_alignment=["count", "table"],
)
@no_type_check
def code_logits_kernel(
    rotated,
    step,
    codes,
    before,
    pitch,
    table,
    width,
    count,
    logits,
    columns,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Compute the largest logits of a group of queries in `BLOCK` pages of a table row, from codes.

    `rotated` and `step` are those of `rotate_kernel`. `codes` begin with `before` other pages, and
    then are [table_rows, pitch, BYTES]. If PAGED, they are `pitch` * 2 * UNIT bytes apart by page
    of the `table`, after `before` * 2 * UNIT others. The rest is as in `bound_logits_kernel`.
    """
    r = tl.program_id(0)
    BYTES: tl.constexpr = TOKENS * (4 * LINES + 2)
    known = tl.minimum(tl.load(count + r).to(tl.int32), columns)
    if tl.program_id(1) * BLOCK < known:
        slot = tl.arange(0, BLOCK * PADDED)
        column, t = tl.program_id(1) * BLOCK + slot // PADDED, slot % PADDED
        there = (column < known) & (t < TOKENS)
        if PAGED:
            mine = table + r.to(tl.int64) * width
            page = page_at(mine, width, column, there, REVERSE)
            base = codes + (before.to(tl.int64) + page.to(tl.int64) * pitch) * (2 * UNIT)
        else:
            base = codes + (before + r.to(tl.int64) * pitch + column.to(tl.int64)) * BYTES
        g, e = tl.arange(0, ROWS), tl.arange(0, LINE)
        shift = 8 * (e % 4) + 2 * (e // 4)
        found = tl.zeros([BLOCK * PADDED, ROWS], tl.float32)
        for line in range(LINES):
            word = word_at(base + 4 * (line * TOKENS + t), there, PAGED or BYTES % 4 == 0)
            level = 2 * ((word[:, None] >> shift[None, :]) & 3) - 3
            at = (r * ROWS + g)[None, :] * WIDTH + e[:, None] + line * LINE
            found = tl.dot(level.to(tl.float16), tl.load(rotated + at), found)  # exact
        scales = (base + 4 * LINES * TOKENS + 2 * t).to(tl.pointer_type(tl.float16))
        scale = tl.load(scales, mask=there, other=0).to(tl.float32)
        size = tl.load(step + r * ROWS + g)
        found = tl.where(there[:, None], found * scale[:, None] * size[None, :], float("-inf"))
        most = tl.max(tl.reshape(found, (BLOCK, PADDED, ROWS)), 1)
        most += (0.0 * size)[None, :]  # not a number, if the step is none or is infinite
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        into = logits + (r.to(tl.int64) * GROUP + g)[None, :] * columns + column[:, None]
        tl.store(into, most, mask=(column < known)[:, None] & (g < GROUP)[None, :])


@triton.jit
@no_type_check
def logits_at(logits, first, columns, column, known, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Load the bounds of a group's logits [ROWS, pages]; -inf where there are none."""
    g = tl.arange(0, ROWS)
    at = g.to(tl.int64)[:, None] * columns + column[None, :]
    there = (g < GROUP)[:, None] & (column < known)[None, :]
    return tl.load(logits + (first + at), mask=there, other=float("-inf"))


@triton.jit
@no_type_check
def ordered(x):
    """Return numbers as uint32 in the same order, all of them below the largest uint32."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # both zeros are equal
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
@no_type_check
def key_at(keys, column, full):
    """Load what orders pages; those to be read in any case have the largest uint32."""
    return tl.load(keys + column, mask=column < full, other=0).to(tl.uint32, bitcast=True)


@triton.jit
@no_type_check
def page_at(row, pitch, column, some, REVERSE: tl.constexpr):
    """Load the marked page numbers of a table row."""
    if REVERSE:
        column = pitch - 1 - column
    return tl.load(row + column, mask=some, other=0)


@triton.jit
@no_type_check
def limit_of(held, most, SHARE: tl.constexpr, NEAR: tl.constexpr):
    """`PageReading.pages` of a number of pages; SHARE is a percentage, or 0."""
    limit = tl.minimum(held, most)
    if SHARE > 0:
        share = held.to(tl.float64) * tl.full((), SHARE, tl.float64)
        share = share / tl.full((), 100, tl.float64) - tl.full((), NEAR, tl.float64)
        whole = share.to(tl.int32)
        limit = tl.minimum(limit, whole + (whole.to(tl.float64) < share).to(tl.int32))
    return limit


@triton.jit(
    do_not_specialize=["bounded", "columns", "pitch", "width", "first", "last", "most"],
    do_not_specialize_on_alignment=["length", "count", "table"],
)
@no_type_check
def select_pages_kernel(
    logits,
    bounded,
    keys,
    columns,
    length,
    count,
    table,
    pitch,
    into,
    width,
    left,
    first,
    last,
    most,
    SHARE: tl.constexpr,
    NEAR: tl.constexpr,
    TOKENS: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    MANY: tl.constexpr,
):
    """Select the pages of a table row.

    `logits` are [table_rows, GROUP, bounded], `keys` [table_rows, columns] are memory. `into`
    [table_rows, width] gets the pages, 0 behind them, and `left` the length of the row.
    """
    r = tl.program_id(0)
    tokens = tl.load(length + r).to(tl.int32)
    full, rest = tokens // TOKENS, tokens % TOKENS
    opened = tl.where(rest > 0, 1, 0)
    known = tl.minimum(tl.load(count + r).to(tl.int32), tl.minimum(full, bounded))
    mine = keys + r.to(tl.int64) * columns
    start = r.to(tl.int64) * GROUP * bounded
    best = tl.full([ROWS], -3.4028234663852886e38, tl.float32)
    for at in range(0, known, PART):
        column = at + tl.arange(0, PART)
        found = logits_at(logits, start, bounded, column, known, GROUP, ROWS)
        found = tl.where(found == found, found, float("-inf"))
        best = tl.maximum(best, tl.max(found, axis=1))
    always = tl.zeros((), tl.int32)
    for at in range(0, full, PART):
        column = at + tl.arange(0, PART)
        found = logits_at(logits, start, bounded, column, known, GROUP, ROWS) - best[:, None]
        # What is not a number is read.
        found = tl.where(found == found, found, float("inf"))
        key = ordered(tl.max(found, axis=0))
        held = column < full
        read = (column >= known) | (column * TOKENS < first)
        read = held & (read | ((column + 1) * TOKENS > tokens - last))
        always += tl.sum(read.to(tl.int32), 0)
        tl.store(mine + column, tl.where(read, -1, key.to(tl.int32, bitcast=True)), held)
    tl.debug_barrier()  # other threads read them
    limit = limit_of(full + opened, most, SHARE, NEAR) - opened
    some = tl.minimum(tl.maximum(limit, always), tl.minimum(full, width - 1))
    digit = tl.arange(0, 256)
    least, wanted = tl.zeros((), tl.uint32), some
    for place in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for at in range(0, full, MANY):
            column = at + tl.arange(0, MANY)
            key, alike = key_at(mine, column, full), column < full
            if place > 0:
                alike = alike & ((key >> (32 - 8 * place)) == least)
            # Others count as 0, which nothing is below.
            one = tl.where(alike, (key >> (24 - 8 * place)) & 255, 0)
            counts += tl.histogram(one.to(tl.int32), 256)
        below = tl.cumsum(counts, 0)
        from_here = tl.sum(counts, 0) - below + counts  # with this digit or a higher one
        found = tl.maximum(tl.sum((from_here >= wanted).to(tl.int32), 0) - 1, 0)
        wanted -= tl.sum(tl.where(digit == found + 1, from_here, 0), 0)
        least = (least << 8) | found.to(tl.uint32)
    # `wanted` of the pages with the lowest score are read, the first ones.
    row, target = table + r.to(tl.int64) * pitch, into + r.to(tl.int64) * width
    done, equal = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for at in range(0, full, MANY):
        column = at + tl.arange(0, MANY)
        held, key = column < full, key_at(mine, column, full)
        same = held & (key == least)
        rank = equal + tl.cumsum(same.to(tl.int32), 0)
        read = (held & (key > least)) | (same & (rank <= wanted))
        to = done + tl.cumsum(read.to(tl.int32), 0) - 1
        page = page_at(row, pitch, column, read, REVERSE)
        tl.store(target + to, page, mask=read & (to < width))
        equal += tl.sum(same.to(tl.int32), 0)
        done += tl.sum(read.to(tl.int32), 0)
    page = page_at(row, pitch, full, opened > 0, REVERSE)
    for at in range(some, width, MANY):
        column = at + tl.arange(0, MANY)
        tl.store(target + column, tl.where(column == some, page, 0), mask=column < width)
    tl.store(left + r, some * TOKENS + rest)


def select(
    q: Float[Tensor, "B H G D"],
    pages: PagedTokens,
    bounds: PageBounds,
    reading: PageReading,
    most: int,
) -> PagedTokens:
    """Select as `kv_attention.select_pages`, at most `most` full pages of a table row."""
    batch, heads, group, dim = q.shape
    table_rows, tokens, device = batch * heads, pages.layout.tokens, q.device
    longest = known_longest(pages)
    columns, width = longest // tokens, most + 1
    bounded, both, pitch, before = _placed(bounds, columns)
    q = adjacent(q)[:, :, :, None]
    length, count = pages.length.to(torch.int32).contiguous(), bounds.count.contiguous()
    table = pages.table.to(torch.int32).contiguous()
    logits = torch.empty(table_rows, group, bounded, dtype=torch.float32, device=device)
    keys = torch.empty(table_rows, columns, dtype=torch.int32, device=device)
    into = torch.empty(batch, heads, width, dtype=torch.int32, device=device)
    left = torch.empty_like(length)
    padded, rows = _power(dim), _power(group)
    with launching_on(q):
        stored = base_of(both)[0], before, pitch, table, table.shape[2], count, logits, bounded
        if bounded and bounds.coded:
            tile = _power(tokens)
            block = max(1, SLOTS // tile)
            rotated, step = _rotated(q)
            code_logits_kernel[(table_rows, -(-bounded // block))](
                rotated,
                step,
                *stored,
                GROUP=group,
                ROWS=rotated.shape[1],
                WIDTH=rotated.shape[2],
                LINES=code_rows(dim),
                TOKENS=tokens,
                PADDED=tile,
                BLOCK=block,
                PAGED=bounds.in_pages,
                REVERSE=pages.reverse,
                num_warps=4,
            )
        elif bounded:
            block = max(1, TILE // padded)
            bound_logits_kernel[(table_rows, -(-bounded // block))](
                q,
                strides_of(q),
                *stored,
                heads,
                GROUP=group,
                DIM=dim,
                PADDED=padded,
                BLOCK=block,
                PAGED=bounds.in_pages,
                REVERSE=pages.reverse,
                num_warps=4,
            )
        select_pages_kernel[(table_rows,)](
            logits,
            bounded,
            keys,
            columns,
            length,
            count,
            table,
            table.shape[2],
            into,
            width,
            left,
            reading.first,
            reading.last,
            reading.most_pages(tokens),
            SHARE=reading.share or 0.0,
            NEAR=NEAR,
            TOKENS=tokens,
            REVERSE=pages.reverse,
            GROUP=group,
            ROWS=rows,
            PART=max(1, TILE // rows),
            MANY=MANY,
            num_warps=4,
        )
    return replace(
        pages,
        table=into,
        length=left.to(pages.length.dtype),
        reverse=False,
        longest=min(longest, most * tokens + tokens - 1),
        tiles=None,
    )


def _rotated(
    q: Float[Tensor, "B H G 1 D"],
) -> tuple[Float16[Tensor, "S G2 D2"], Float32[Tensor, "S G2"]]:
    """Rotate the queries of each table row and round them; return them with their steps."""
    batch, heads, group, _, dim = q.shape
    rows, width = max(LEAST, _power(group)), max(LEAST, _power(dim))
    lead = batch * heads, rows
    rotated = torch.empty(*lead, width, dtype=torch.float16, device=q.device)
    step = torch.empty(lead, dtype=torch.float32, device=q.device)
    with launching_on(q):
        rotate_kernel[(batch * heads, rows // LEAST)](
            q,
            strides_of(q),
            code_rotation(dim, q.device),
            rotated,
            step,
            heads,
            GROUP=group,
            DIM=dim,
            ROWS=rows,
            WIDTH=width,
            PART=min(width, 128),
            num_warps=4,
        )
    return rotated, step


def _placed(
    bounds: PageBounds, columns: int
) -> tuple[int, Float[Tensor, "*T _"] | UInt8[Tensor, "*T _"], int, int]:
    """Return the columns with bounds, these, and their pitch and offset as kernels take them."""
    both, width = bounds.both, bounds.both.shape[-1]
    if bounds.in_pages:
        unit = 2 * UNIT.value // both.element_size()
        if both.stride(1) != 1 or both.stride(0) % unit or int(both.storage_offset()) % unit:
            both = pad(both, (0, -width % unit))[:, :width]
        return columns, both, both.stride(0) // unit, int(both.storage_offset()) // unit
    both = both.contiguous()
    if both.storage_offset() % width:  # those of a layer begin with a page
        both = both.clone()
    bounded = min(columns, both.shape[2])
    return bounded, both, both.shape[2], both.storage_offset() // width


def _power(size: int) -> int:
    """Round up to a power of two."""
    return 1 << (size - 1).bit_length()
