"""The second launch of a step: emptied pages go back. What the third takes comes after them."""

from typing import no_type_check

import triton
import triton.language as tl

from kv_paging.gpu.counts import total


@triton.jit
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
    """Put the emptied pages of some streams at the end of the list of free pages."""
    block = tl.program_id(0)
    page = tl.load(given + block.to(tl.int64) * ROWS + tl.arange(0, ROWS))
    some = page >= 0
    rank = total(gives, block, MANY) + tl.cumsum(some.to(tl.int32), 0) - 1
    begin = tl.load(start)
    free = tl.load(count)
    tl.store(ids + (begin + free + rank) % size, page, some)
    if block == 0:  # the list as it will be: programs of the next launch still read where it begins
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
    """The free pages that the marked streams take: each the next one."""
    rank = total(takes, before, MANY) + tl.cumsum(some.to(tl.int32), 0) - 1
    return tl.load(ids + (begin + rank) % size, some, other=0)
