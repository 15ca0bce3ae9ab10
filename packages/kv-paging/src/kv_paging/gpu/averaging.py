"""Scores that go on as means over queries, where they lie."""

from typing import Final, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from kv_paging.gpu.bits import store_bits
from kv_paging.gpu.numbers import blocks, numbers_of, on
from kv_paging.gpu.reading import number_at, tier_of
from kv_paging.gpu.rows import beside, page_at
from kv_paging.table import pages_for
from kv_policy import PagedTokens, RunningMean

_SLOTS: Final = 1024  # that a program looks at
_ALL: Final = 2**31 - 1


@triton.jit(do_not_specialize=["most", "slots", "count"])
@no_type_check
def average_kernel(
    data,
    pitch,
    table,
    width,
    lengths,
    streams,
    before,
    mass,
    seen,
    most,
    slots,
    count,
    LAYOUT: tl.constexpr,
    HOLES: tl.constexpr,
    MANY: tl.constexpr,
):
    """Let `MANY` of all scores go on; there are zeros from a stream's end to that of its page."""
    tokens: tl.constexpr = LAYOUT[0]
    every = (slots + tokens - 1) // tokens * tokens
    place = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    there = place < count.to(tl.int64) * every
    which = place // every
    slot = (place % every).to(tl.int32)
    stream = tl.load(streams + which, there, other=0)
    length = tl.load(lengths + stream, there, other=0)
    some = there & (slot < (tl.minimum(length, slots) + tokens - 1) // tokens * tokens)
    page = page_at(data, pitch, table, width, stream, slot // tokens, some, LAYOUT)
    row = slot % tokens
    held = some & (slot < length)
    position = number_at(page, row, held, LAYOUT[2], LAYOUT)
    old = number_at(page, row, held, LAYOUT[1], LAYOUT).to(tl.float32, bitcast=True)
    first = tl.load(before + which, there, other=0)
    past = first - 1 - position.to(tl.int64)
    past = tl.minimum(tl.maximum(past, 0), most).to(tl.float32)
    given = tl.load(mass + which * slots + slot, held, other=0.0)
    counted = tl.load(seen + which * slots + slot, held, other=0).to(tl.float32)
    mean = tl.div_rn(old * past + given, tl.maximum(past + counted, 1.0))
    number = tl.where(held, tl.where(first < 0, old, mean), 0.0)
    if HOLES:
        number = tl.where(held & (position >= 0), number, float("inf"))
    aligned: tl.constexpr = (LAYOUT[4] % 4 == 0) and (LAYOUT[1] % 4 == 0)
    bits = number.to(tl.int32, bitcast=True)
    store_bits(beside(page, row, LAYOUT[1]), bits, some, 4, aligned)


def average(
    pages: PagedTokens,
    streams: Tensor,
    before: Tensor,
    mass: Tensor,
    seen: Tensor,
    mean: RunningMean,
) -> None:
    """See `PageKernels.average`; one launch."""
    tokens, slots = pages.layout.tokens, mass.shape[1]
    every = len(streams) * pages_for(slots, tokens) * tokens
    with on(pages.data):
        average_kernel[(blocks(every, _SLOTS),)](
            *tier_of(pages),
            streams.contiguous(),
            before.contiguous(),
            mass.float().contiguous(),
            seen.contiguous(),
            _ALL if mean.last is None else mean.last,
            slots,
            len(streams),
            numbers_of(pages),
            pages.holes,
            _SLOTS,
            enable_fp_fusion=False,  # so that a mean is that of the other kernels to the last bit
        )
