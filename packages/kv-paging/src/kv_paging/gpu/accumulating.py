"""In-place updates of scores that are running means over queries or running sums."""

from typing import Final, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from kv_paging.gpu.numbers import numbers_of
from kv_paging.gpu.reading import (
    SLOTS,
    number_at,
    over_page_ends,
    put_scores,
    tier_of,
    to_page_ends,
)
from kv_policy import PagedTokens, Running, RunningMean
from kv_policy.launching import launching_on

_ALL: Final = 2**31 - 1


@triton.jit(
    do_not_specialize=["width", "number", "slots", "count"],
    do_not_specialize_on_alignment=["table", "lengths", "table_rows", "before", "mass", "seen"],
)
@no_type_check
def accumulate_kernel(
    data,
    pitch,
    table,
    width,
    lengths,
    table_rows,
    before,
    mass,
    seen,
    places,
    number,
    slots,
    count,
    LAYOUT: tl.constexpr,
    MEAN: tl.constexpr,
    HOLES: tl.constexpr,
    MANY: tl.constexpr,
):
    """Update `MANY` of all scores; write zeros from a table row's end to the end of its page.

    `number` is the maximum weight of past queries for running means, or the divisor of a sum.
    `places` are positions, -1 in empty slots, if pages store none.
    """
    which, slot, page, row, held, some = to_page_ends(
        data, pitch, table, width, lengths, table_rows, slots, count, LAYOUT, MANY
    )
    if places is None:
        position = number_at(page, row, held, LAYOUT[2], LAYOUT)
    else:
        position = tl.load(places + which * slots + slot, held, other=-1).to(tl.int32)
    old = number_at(page, row, held, LAYOUT[1], LAYOUT).to(tl.float32, bitcast=True)
    first = tl.load(before + which, some, other=0)
    given = tl.load(mass + which * slots + slot, held, other=0.0)
    if MEAN:
        past = first - 1 - position.to(tl.int64)
        past = tl.minimum(tl.maximum(past, 0), number).to(tl.float32)
        counted = tl.load(seen + which * slots + slot, held, other=0).to(tl.float32)
        score = tl.div_rn(old * past + given, tl.maximum(past + counted, 1.0))
    else:
        score = old + tl.div_rn(given, tl.full(given.shape, 1.0, tl.float32) * number)
    score = tl.where(held, tl.where(first < 0, old, score), 0.0)
    if places is not None:
        score = tl.where((position >= 0) | (first < 0), score, 0.0)
    if HOLES:
        score = tl.where(held & (position >= 0), score, float("inf"))
    put_scores(page, row, score, some, LAYOUT)


def accumulate(
    pages: PagedTokens,
    table_rows: Tensor,
    before: Tensor,
    mass: Tensor,
    seen: Tensor,
    running: Running,
    position: Tensor | None = None,
) -> None:
    """See `PageKernels.accumulate`; one launch."""
    slots = mass.shape[1]
    with launching_on(pages.data):
        accumulate_kernel[over_page_ends(pages, table_rows, slots)](
            *tier_of(pages),
            table_rows.contiguous(),
            before.contiguous(),
            mass.float().contiguous(),
            seen.contiguous(),
            None if position is None else position.contiguous(),
            _number(running),
            slots,
            len(table_rows),
            numbers_of(pages),
            isinstance(running, RunningMean),
            pages.holes,
            SLOTS,
            enable_fp_fusion=False,  # scores are bit-identical to those of other kernels
        )


def _number(running: Running) -> int:
    """Return the maximum weight of past queries of a mean, or the divisor of a sum."""
    if isinstance(running, RunningMean):
        return _ALL if running.last is None else running.last
    return running.over
