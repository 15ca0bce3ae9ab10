"""What a policy loses against the full cache, and whether that is more than was allowed."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final

LOWER_IS_BETTER: Final = frozenset({"nll"})
LEAST_SAMPLES: Final = 5  # with fewer, a standard error says nothing, and nothing is noise


@dataclass(frozen=True, slots=True)
class Loss:
    """What is lost on a task, positive where the policy is worse, and what of it may be noise."""

    mean: float
    noise: float
    full: float  # mean score of the full cache

    @property
    def share(self) -> float:
        """The loss as a share of the full cache's score; 0 where that is 0."""
        return self.mean / abs(self.full) if self.full else 0.0

    def within(self, allowed: float) -> bool:
        """Whether no more is lost than this share of the full cache's score, or than noise."""
        return self.mean <= max(allowed * abs(self.full), self.noise) + 1e-9


def loss(scores: Sequence[float], full: Sequence[float], task: str) -> Loss:
    """Compare a policy's scores with those of the full cache on the same samples.

    Samples are compared in pairs, so how hard a prompt is does not blur the difference. Of nats,
    three standard errors of the mean difference are noise, as in LeanKV's paper, which calls a
    setting performance-neutral within three standard deviations of the full cache's own results.
    Of right answers it is one, of the differences or of the full cache's own scores, whichever is
    less: where the full cache is always right, nothing that is lost is noise.

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
    if len(lost) < LEAST_SAMPLES:
        noise = 0.0
    elif task in LOWER_IS_BETTER:
        noise = 3 * _error(lost)
    else:
        noise = min(_error(lost), _error(full))
    return Loss(fmean(lost), noise, fmean(full))


def _error(values: Sequence[float]) -> float:
    """Standard error of a mean."""
    return stdev(values) / sqrt(len(values))
