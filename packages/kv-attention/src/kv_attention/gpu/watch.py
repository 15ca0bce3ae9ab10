"""What a decode step observes of a part: from its logits and the log-sum-exp over all parts."""

from typing import no_type_check

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def term_of(p, even, above, TERM: tl.constexpr):
    """What is summed of the attention p: itself, its square, its entropy, or whether it is large.

    `even` is the attention that every token up to a query would get if all got the same.
    """
    if TERM == 1:
        return p * p
    if TERM == 2:
        return tl.where(p > 0, -p * tl.log2(tl.where(p > 0, p, 1.0)) / LOG2E, 0.0)
    if TERM == 3:
        return (p > above * even).to(tl.float32)
    return p


@triton.jit
@no_type_check
def finite(lse):
    """A log-sum-exp that may be taken off a logit: 0 where nothing is seen and nothing counts."""
    return tl.where(lse == float("-inf"), 0.0, lse)


@triton.jit
@no_type_check
def watch_kernel(
    logits,
    lse,
    position,
    places,
    place_strides,
    mass,
    seen,
    width,
    streams,
    heads,
    above,
    skip,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    MEAN: tl.constexpr,
    TERMS: tl.constexpr,
    FAR: tl.constexpr,
):
    """Sum the terms over a group: `mass` is [terms, streams, width], `seen` [streams, width].

    `logits` [streams, GROUP, width] are in powers of two, `lse` [streams, GROUP] is not. With FAR
    tokens count from `skip` positions before the query on.
    """
    r = tl.program_id(1)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < width
    b, h = r // heads, r % heads
    at = tl.load(position + b) + tl.zeros([BLOCK], tl.int64)
    first = logits + r.to(tl.int64) * GROUP * width + slot
    counts = tl.load(first, mask=inside, other=float("-inf")) > float("-inf")
    counts = counts & (at >= 0)
    if FAR:
        mine = places + b.to(tl.int64) * place_strides[0] + h.to(tl.int64) * place_strides[1]
        place = tl.load(mine + slot.to(tl.int64) * place_strides[2], mask=counts, other=0)
        counts = counts & (at - place >= skip)
    even = 1.0 / tl.maximum(at + 1, 1).to(tl.float32)
    for i in tl.static_range(len(TERMS)):
        total = tl.zeros([BLOCK], tl.float32)
        for g in range(GROUP):
            logit = tl.load(first + g * width, mask=counts, other=float("-inf"))
            whole = finite(tl.load(lse + r * GROUP + g)) * LOG2E
            p = tl.where(counts, tl.exp2(logit - whole), 0.0)
            term = term_of(p, even, above, TERMS[i])
            total = tl.maximum(total, term) if MAX else total + term
        if MEAN:
            total = total / GROUP
        into = mass + (i * streams + r).to(tl.int64) * width + slot
        tl.store(into, tl.where(counts, total, 0.0), mask=inside)
    tl.store(seen + r.to(tl.int64) * width + slot, counts.to(tl.int32), mask=inside)
