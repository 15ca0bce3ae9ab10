"""Scores that go on as means over queries, where they lie."""

from typing import Final, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from kv_paging.gpu.numbers import numbers_of, on
from kv_paging.gpu.reading import (
    SLOTS,
    number_at,
    over_page_ends,
    put_scores,
    tier_of,
    to_page_ends,
)
from kv_paging.gpu.rows import page_at
from kv_policy import PagedTokens, RunningMean

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
    which, stream, slot, held, some = to_page_ends(lengths, streams, slots, count, LAYOUT, MANY)
    tokens: tl.constexpr = LAYOUT[0]
    page = page_at(data, pitch, table, width, stream, slot // tokens, some, LAYOUT)
    row = slot % tokens
    position = number_at(page, row, held, LAYOUT[2], LAYOUT)
    old = number_at(page, row, held, LAYOUT[1], LAYOUT).to(tl.float32, bitcast=True)
    first = tl.load(before + which, some, other=0)
    past = first - 1 - position.to(tl.int64)
    past = tl.minimum(tl.maximum(past, 0), most).to(tl.float32)
    given = tl.load(mass + which * slots + slot, held, other=0.0)
    counted = tl.load(seen + which * slots + slot, held, other=0).to(tl.float32)
    mean = tl.div_rn(old * past + given, tl.maximum(past + counted, 1.0))
    number = tl.where(held, tl.where(first < 0, old, mean), 0.0)
    if HOLES:
        number = tl.where(held & (position >= 0), number, float("inf"))
    put_scores(page, row, number, some, LAYOUT)


def average(
    pages: PagedTokens,
    streams: Tensor,
    before: Tensor,
    mass: Tensor,
    seen: Tensor,
    mean: RunningMean,
) -> None:
    """See `PageKernels.average`; one launch."""
    slots = mass.shape[1]
    with on(pages.data):
        average_kernel[over_page_ends(pages, streams, slots)](
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
            SLOTS,
            enable_fp_fusion=False,  # so that a mean is that of the other kernels to the last bit
        )
