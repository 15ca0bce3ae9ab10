"""The rule by which ours and a peer are chosen, the same for both."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

BUDGETS: Final = (0.5, 0.25, 0.125)  # shares of an uncompressed cache
ROUNDING: Final = 0.001  # of an uncompressed cache; presses round to whole tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to hold a cache, in one cell."""

    environment: str
    way: str
    scores: tuple[float, ...]  # of the same samples for all
    held: float  # bytes over those of an uncompressed cache, of the sample where it is most

    @property
    def score(self) -> float:
        """Their mean."""
        return fmean(self.scores)


def best(
    candidates: Iterable[Candidate], budget: float, *, least: bool = False
) -> Candidate | None:
    """Give the best of those that hold no more than a budget, None if none does.

    The best has the highest score, or with `least` the lowest; of equal ones it is the one that
    holds less, and then the first by name.
    """
    sign = 1 if least else -1
    fitting = (c for c in candidates if c.held <= budget + ROUNDING)
    return min(fitting, key=lambda c: (sign * c.score, c.held, c.environment, c.way), default=None)


def winner(ours: float, peer: float, *, least: bool = False) -> Literal["ours", "peer", "equal"]:
    """Say which score is the better one."""
    if math.isclose(ours, peer, abs_tol=1e-9):
        return "equal"
    return "ours" if (ours < peer) == least else "peer"
