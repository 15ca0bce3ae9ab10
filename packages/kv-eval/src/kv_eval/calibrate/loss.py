"""The loss of a policy against the full cache, and whether it exceeds the allowed loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final

LOWER_IS_BETTER: Final = frozenset({"nll"})
LEAST_SAMPLES: Final = 5  # with fewer, a standard error is meaningless, and noise counts as 0


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss on a task, positive if the policy is worse, and its noise level."""

    mean: float
    noise: float
    full: float  # mean score of the full cache

    @property
    def share(self) -> float:
        """The loss as a share of the full cache's score; 0 where that is 0."""
        return self.mean / abs(self.full) if self.full else 0.0

    def within(self, allowed: float) -> bool:
        """Return whether the loss is at most this share of the full cache's score, or noise."""
        return self.mean <= max(allowed * abs(self.full), self.noise) + 1e-9


def loss(scores: Sequence[float], full: Sequence[float], task: str) -> Loss:
    """Compare a policy's scores with those of the full cache on the same samples.

    Samples are compared in pairs, so the difficulty of a prompt cancels out. For nats, the noise
    level is three standard errors of the mean difference, as in LeanKV's paper, which calls a
    setting performance-neutral within three standard deviations of the full cache's own results.
    For correct answers it is one standard error, of the differences or of the full cache's own
    scores, whichever is smaller: if the full cache is always right, no loss counts as noise.

    Args:
        scores: of the policy, one per sample.
        full: of the full cache, in the same order.
        task: lower is better for nll, higher for the others.

    Raises:
        ValueError: no samples, or different numbers of them.
    """
    if not scores or len(scores) != len(full):
        raise ValueError(
            f"{len(scores)} scores are compared with {len(full)} of the full cache; pass one of "
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
    """Return the standard error of a mean."""
    return stdev(values) / sqrt(len(values))
