"""Conversion of one rate for the whole cache to the ranks of all heads (ZACK, section 5.2)."""

from dataclasses import dataclass
from math import floor
from typing import Final, TypeAlias

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from kv_svd.fit import ranks

Spectra: TypeAlias = tuple[Float64[Tensor, "N H D"], Float64[Tensor, "N H Dv"]]

MULTIPLE: Final = 16  # default multiple of ranks; calibration searches rates with it
_STEPS = 60  # bisection steps for the removal rate: beyond float64 resolution


@dataclass(frozen=True)
class Allotment:
    """The dimensions that keys and values of each head keep, and the resulting rate."""

    key: Int[Tensor, "N H"]
    value: Int[Tensor, "N H"]
    removal: float | None  # share of the singular values to remove; None: uniform ranks
    rate: float  # removed share of the cache's numbers
    unrounded: float  # the rate before ranks were rounded to a multiple

    @property
    def cost_of_rounding(self) -> float:
        """Share of the cache kept because ranks are rounded.

        Adaptive ranks are rounded up, so the cost is never negative. Uniform ranks are rounded
        down; a negative cost means that rounding removes more than requested.
        """
        return self.unrounded - self.rate


def at_removal(
    key: Float64[Tensor, "N H D"],
    value: Float64[Tensor, "N H Dv"],
    removal: int | float,
    multiple: int = 1,
) -> Allotment:
    """Drop each head's dimensions whose singular values sum to at most `removal` of its sum.

    Args:
        key: descending singular values of queries and keys, by layer and KV head.
        value: of values and the output projection.
        removal: from 0 to below 1, shared by all heads and by keys and values (Eq. 6).
        multiple: ranks are rounded up to a multiple of this.

    Raises:
        ValueError: the removal rate or the multiple is out of range.
    """
    kept_key, kept_value = (ranks(s, removal, multiple) for s in (key, value))
    return Allotment(
        kept_key,
        kept_value,
        float(removal),
        _removed(kept_key, kept_value, key, value),
        _removed(ranks(key, removal), ranks(value, removal), key, value),
    )


def at_rate(
    key: Float64[Tensor, "N H D"],
    value: Float64[Tensor, "N H Dv"],
    rate: int | float,
    multiple: int = 1,
) -> Allotment:
    """Find the ranks of the least removal rate that removes at least `rate` of the cache.

    This is the paper's F_p, from an overall rate to the ranks of all heads. The removed share is
    monotonic in the removal rate, so it is found by bisection.

    Raises:
        ValueError: the rate is out of range, or too high for ranks of at least one dimension, or
            one `multiple`.
    """
    _expect_rate(rate)
    low, high = 0.0, 1 - 2**-40
    if at_removal(key, value, low, multiple).rate >= rate:
        return at_removal(key, value, low, multiple)
    most = at_removal(key, value, high, multiple)
    if most.rate < rate:
        raise ValueError(
            f"a rate of {rate} cannot be reached: with ranks of a multiple of {multiple}, heads "
            f"of {key.shape[-1]} and {value.shape[-1]} dimensions can drop at most {most.rate:.4f}"
        )
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if at_removal(key, value, middle, multiple).rate >= rate:
            high = middle
        else:
            low = middle
    return at_removal(key, value, high, multiple)


def uniform(
    key: Float64[Tensor, "N H D"],
    value: Float64[Tensor, "N H Dv"],
    rate: int | float,
    multiple: int = 1,
) -> Allotment:
    """Return equal ranks for all heads, with keys and values in proportion, that remove `rate`.

    Ranks are rounded down to a multiple, and are at least one `multiple` (or all dimensions of
    smaller heads), so at least the rate is removed.

    Args:
        key: singular values of queries and keys, by layer and KV head; only their shape is used.
        value: of values and the output projection.
        rate: share of the cache to remove, from 0 to below 1.
        multiple: ranks are multiples of this.

    Raises:
        ValueError: the rate is out of range, or too high for ranks of at least one `multiple`.
    """
    _expect_rate(rate)
    dims = key.shape[-1], value.shape[-1]
    exact = tuple(max(1, int(dim * (1 - rate) + 1e-9)) for dim in dims)
    kept = tuple(max(1, rank // multiple) * multiple for rank in exact)
    each = [
        torch.full(s.shape[:2], min(rank, dim), device=s.device)
        for s, rank, dim in zip((key, value), kept, dims, strict=True)
    ]
    found = Allotment(
        each[0], each[1], None, _removed(each[0], each[1], key, value), 1 - sum(exact) / sum(dims)
    )
    if found.rate < rate - 1e-9:
        raise ValueError(
            f"a rate of {rate} cannot be reached with ranks of at least {multiple}: heads of "
            f"{dims[0]} and {dims[1]} dimensions can drop at most {found.rate:.4f}"
        )
    return found


def greatest_rate(key_dim: int, value_dim: int, multiple: int = 1) -> float:
    """Return the rate at which heads keep one `multiple` of dimensions, or all if fewer."""
    left = min(key_dim, multiple) + min(value_dim, multiple)
    return 1 - left / (key_dim + value_dim)


def levels(
    key: Float64[Tensor, "N H D"],
    value: Float64[Tensor, "N H Dv"],
    count: int,
    multiple: int = 1,
) -> tuple[float, ...]:
    """Return rates that adaptive ranks reach, ascending and spread out; at most `count`.

    Each is rounded down to four digits, and `at_rate` removes at least that. The result is empty
    for heads with no more dimensions than `multiple`.
    """
    # The last digit of most * count / count may exceed the reachable rate.
    most = greatest_rate(key.shape[-1], value.shape[-1], multiple)
    found = {
        floor(at_rate(key, value, asked, multiple).rate * 10000) / 10000
        for asked in (min(most, most * step / count) for step in range(1, count + 1))
    }
    return tuple(sorted(found - {0.0}))


def _removed(kept_key: Tensor, kept_value: Tensor, key: Tensor, value: Tensor) -> float:
    left = int(kept_key.sum()) + int(kept_value.sum())
    return 1 - left / (key.numel() + value.numel())


def _expect_rate(rate: int | float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"the rate is {rate}; it is a share of the cache, from 0 to below 1")
