"""95 % confidence intervals of means over samples."""

from collections.abc import Sequence
from math import sqrt
from typing import Final

import torch

NORMAL: Final = 1.959963984540054  # the normal distribution's 97.5 % quantile
RESAMPLES: Final = 10_000
Interval = tuple[float, float]


def of_mean(scores: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of a mean; None for a single score that is not 0 or 1.

    If every score is 0 or 1 it is Wilson's (1927), which does not collapse when all are equal;
    otherwise the percentile bootstrap (Efron, 1979), with fixed resamples.

    Raises:
        ValueError: no scores.
    """
    _expect(scores)
    if _decided(scores):
        return _wilson(sum(scores), len(scores))
    return _bootstrap(scores) if len(scores) > 1 else None


def of_change(scores: Sequence[float], before: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the mean change, sample by sample, from `before` to `scores`.

    If all are 0 or 1 it is that of Agresti and Min (2005) for matched proportions: one half is
    added to each of the four possible pairs. Otherwise it is the bootstrap of changes.

    Raises:
        ValueError: no scores, or different numbers of them.
    """
    _expect(scores)
    changes = [new - old for new, old in zip(scores, before, strict=True)]
    if _decided(scores) and _decided(before):
        return _matched(changes.count(1), changes.count(-1), len(changes))
    return _bootstrap(changes) if len(changes) > 1 else None


def _wilson(right: float, count: int) -> Interval:
    share, extra = right / count, NORMAL**2 / count
    middle = (share + extra / 2) / (1 + extra)
    half = NORMAL * sqrt(share * (1 - share) / count + extra / (4 * count)) / (1 + extra)
    # The interval contains the share; rounding must not exclude it at an end.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _matched(won: int, lost: int, count: int) -> Interval:
    won_, lost_, all_ = won + 0.5, lost + 0.5, count + 2
    middle = (won_ - lost_) / all_
    half = NORMAL * sqrt((won_ + lost_) - (won_ - lost_) ** 2 / all_) / all_
    return max(-1.0, middle - half), min(1.0, middle + half)


def _bootstrap(values: Sequence[float]) -> Interval:
    drawn = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(drawn), (RESAMPLES, len(drawn)), generator=generator)
    means = drawn[places].mean(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _decided(scores: Sequence[float]) -> bool:
    return all(score in (0, 1) for score in scores)


def _expect(scores: Sequence[float]) -> None:
    if not scores:
        raise ValueError("an interval needs at least one score")
