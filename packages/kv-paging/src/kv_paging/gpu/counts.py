"""Sums over what lies before: how programs that run at once agree on places without a list."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def total(numbers, end, MANY: tl.constexpr):
    """The sum of the first `end` numbers, `MANY` at a time."""
    found = tl.zeros((MANY,), tl.int32)
    for first in range(0, end, MANY):
        i = first + tl.arange(0, MANY)
        found += tl.load(numbers + i, i < end, other=0).to(tl.int32)
    return tl.sum(found, 0)
