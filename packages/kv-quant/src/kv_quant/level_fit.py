"""Levels with the least weighted squared error: k-means of numbers, exact over equal bins."""

from typing import Final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

BINS: Final = 1024  # of the range from 0 to 1
_EVERYWHERE: Final = 1e-6  # share of the weight that all bins have, so that no level is undefined


def bin_sums(x: Float[Tensor, " n"], weight: Float[Tensor, " n"]) -> Float64[Tensor, "3 bins"]:
    """Return the sums of weight, weight * x and weight * x**2 in equal bins from 0 to 1.

    Numbers beyond, which rounding may place there, are in the outermost bins.
    """
    x, weight = x.double(), weight.double()
    place = (x * BINS).long().clamp(0, BINS - 1)
    moments = (weight, weight * x, weight * x * x)
    return torch.stack([torch.bincount(place, each, BINS) for each in moments])


def fitted_levels(
    sums: Float64[Tensor, "3 bins"], counts: tuple[int, ...]
) -> dict[int, tuple[float, ...]]:
    """Return, for each count, that many ascending levels with the least weighted squared error.

    The bins are divided into as many runs, and a level is the mean of its run. Of all divisions the
    best is found by dynamic programming.

    Args:
        sums: of `bin_sums`.
        counts: numbers of levels, from 1 to the number of bins.

    Raises:
        ValueError: the weights are not finite, or all are 0.
    """
    total = float(sums[0].sum())
    if not (sums.isfinite().all() and total > 0):
        raise ValueError(f"the weights add up to {total}; levels are fitted to a positive weight")
    middle = _middles()
    least = total * _EVERYWHERE / BINS
    sums = sums + least * torch.stack([torch.ones_like(middle), middle, middle * middle])
    starts = _divisions(sums, max(counts))
    found = {}
    for count in counts:
        stop, runs = BINS, []
        for level in range(count - 1, -1, -1):
            start = int(starts[level][stop])
            runs.append(sums[:, start:stop].sum(1))
            stop = start
        found[count] = tuple(float(run[1] / run[0]) for run in reversed(runs))
    return found


def squared_error(sums: Float64[Tensor, "3 bins"], levels: tuple[float, ...]) -> float:
    """Return the weighted squared error of levels; a bin has the level nearest to its middle."""
    each = torch.tensor(levels, dtype=torch.float64)
    level = each[torch.bucketize(_middles(), (each[1:] + each[:-1]) / 2)]
    weight, first, second = sums
    return max(float((second - 2 * level * first + level * level * weight).sum()), 0.0)


def _middles() -> Float64[Tensor, " bins"]:
    return (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS


def _divisions(sums: Float64[Tensor, "3 bins"], count: int) -> list[Tensor]:
    """Return, by the number of runs less 1, where the last one starts if bins end at each edge."""
    edges = torch.cat([torch.zeros(3, 1, dtype=torch.float64), sums.cumsum(1)], dim=1)
    weight, first, second = edges[:, None, :] - edges[:, :, None]
    empty = torch.ones_like(weight, dtype=torch.bool).tril()
    error = (second - first.square() / weight.masked_fill(empty, 1)).clamp_(min=0)
    error.masked_fill_(empty, torch.inf)
    best, starts = error[0], [torch.zeros(BINS + 1, dtype=torch.long)]
    for _ in range(count - 1):
        best, start = (best[:, None] + error).min(0)
        starts.append(start)
    return starts
