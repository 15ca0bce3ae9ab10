"""Kullback-Leibler divergence of next-token distributions from those of the full cache."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

TAIL: Final = 0.999  # the quantile over tokens that is reported beside the mean
Steps = Iterable[Float[Tensor, "B V"]]


def divergence(
    logits: Float[Tensor, "*B V"], reference: Float[Tensor, "*B V"]
) -> Float64[Tensor, "*B"]:
    """Return the divergence D(P || Q) in nats, computed in float64.

    P is the distribution of the reference, and Q the other one. A token that P excludes counts
    nothing. Values below 0, by rounding, are 0.

    Args:
        logits: of Q, in any float dtype.
        reference: logits of P.
    """
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    each = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    return each.sum(-1).clamp(min=0)


def tail(values: Sequence[float]) -> float:
    """Return the 99.9 % quantile, interpolated between the two nearest values.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    return float(torch.tensor(values, dtype=torch.float64).quantile(TAIL))


class Reference:
    """Logits of the full cache at every target of a batch, kept in the model's memory.

    They are those that pass through `recorded`, or are computed at the first use without these, as
    when a run resumes.
    """

    def __init__(self, computed: Callable[[], Steps]) -> None:
        """Start without logits.

        Args:
            computed: runs the full cache over the batch.
        """
        self._computed = computed
        self._steps: list[Tensor] = []

    def recorded(self, steps: Steps) -> Iterator[Float[Tensor, "B V"]]:
        """Keep the logits of a run of the full cache."""
        self._steps = []
        for step in steps:
            self._steps.append(step)
            yield step

    @property
    def steps(self) -> Sequence[Float[Tensor, "B V"]]:
        """The logits at each target."""
        if not self._steps:
            self._steps = list(self._computed())
        return self._steps


def scored(
    steps: Steps, targets: Int[Tensor, "B L"], reference: Reference | None
) -> tuple[list[float], list[tuple[float, ...]]]:
    """Return each sequence's nats per target, and the divergences at its targets.

    Args:
        steps: logits that predict each target.
        targets: token ids.
        reference: logits of the full cache; None: no divergences.
    """
    total = torch.zeros(len(targets), dtype=torch.float64, device=targets.device)
    apart: list[Tensor] = []
    for i, logits in enumerate(steps):
        total += torch.nn.functional.cross_entropy(logits.double(), targets[:, i], reduction="none")
        if reference is not None:
            apart.append(divergence(logits, reference.steps[i]))
    found = torch.stack(apart, -1).tolist() if apart else [[]] * len(targets)
    return (total / targets.shape[1]).tolist(), [tuple(each) for each in found]
