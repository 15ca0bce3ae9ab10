"""What a policy loses against the full cache, and whether that is more than was allowed."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final

LOWER_IS_BETTER: Final = frozenset({"nll"})
ERRORS: Final = {"nll": 3.0}  # standard errors that count as noise; of right answers it is one


@dataclass(frozen=True, slots=True)
class Loss:
    """The mean of what is lost sample by sample, positive where the policy is worse.

    Samples are compared in pairs, the same prompt under both caches, so how hard a prompt is does
    not blur the difference. LeanKV's paper calls a setting performance-neutral within three
    standard deviations of the full cache's own results.
    """

    mean: float
    error: float  # standard error of that mean; 0 for a single sample
    full: float  # mean score of the full cache

    @property
    def share(self) -> float:
        """The loss as a share of the full cache's score; 0 where that is 0."""
        return self.mean / abs(self.full) if self.full else 0.0

    def within(self, allowed: float, task: str) -> bool:
        """Whether no more is lost than a share of the full cache's score, up to noise.

        Args:
            allowed: 0 for a performance-neutral setting, 0.05 for a loss of 5 %.
            task: nats per token have three standard errors of noise, right answers one.
        """
        noise = ERRORS.get(task, 1.0) * self.error
        return self.mean <= allowed * abs(self.full) + noise + 1e-9


def loss(scores: Sequence[float], full: Sequence[float], task: str) -> Loss:
    """Compare a policy's scores with those of the full cache on the same samples.

    Args:
        scores: of the policy, one a sample.
        full: of the full cache, in the same order.
        task: of nll less is better, of others more.

    Raises:
        ValueError: no samples, or not as many of both.
    """
    if not scores or len(scores) != len(full):
        raise ValueError(
            f"{len(scores)} scores are compared with {len(full)} of the full cache; give one of "
            "each for every sample"
        )
    sign = 1.0 if task in LOWER_IS_BETTER else -1.0
    lost = [sign * (a - b) for a, b in zip(scores, full, strict=True)]
    error = stdev(lost) / sqrt(len(lost)) if len(lost) > 1 else 0.0
    return Loss(fmean(lost), error, fmean(full))
