"""The gate with a threshold: each token is kept or not by its own score."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_evict.gate_file import GateWeights
from kv_policy import DROP, NOBODY, LayerView, PlanView, Step, StepView, VectorName


@dataclass(frozen=True)
class GateThreshold:
    """Keep the tokens whose score reaches the threshold, the first `sinks` and newest `recent`.

    What is kept of a text does not depend on what follows, apart from the newest tokens.
    """

    gate: GateWeights
    threshold: float
    sinks: int
    recent: int

    reads: ClassVar[frozenset[VectorName]] = frozenset({"keys", "values"})
    needs_rope: ClassVar[bool] = True
    scores_once: ClassVar[bool] = True
    plans_chunks: ClassVar[bool] = True  # a token that is old enough stays below the threshold

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the predicted attention probability of each new token; of sinks infinity."""
        score = self.gate.score(view)
        first = (view.position >= 0) & (view.position < self.sinks)
        return score.masked_fill(first, torch.inf)

    @property
    def protected(self) -> int:
        """Sinks and newest tokens."""
        return self.sinks + self.recent

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Evict the tokens below the threshold that are not among the newest."""
        newest = view.position >= (view.length - self.recent)[None, :, None, None]
        kept = (view.position >= 0) & (newest | (view.score >= self.threshold))
        return torch.where(kept, 0, DROP).to(torch.uint8)

    def step(self, view: StepView) -> Step:
        """Store the new token, and evict the weakest older one if it is below the threshold.

        A step moves one token out of the newest, so at most one falls below. The candidate of a
        raw window is older than `recent` if the window is longer.
        """
        low = view.candidate < self.threshold
        candidate = torch.where(low & (self.recent == 0), DROP, 0)
        victim = torch.where(view.weakest[0] < self.threshold, 0, NOBODY)
        each = (candidate, victim, torch.full_like(victim, DROP))
        return Step(*(x.to(torch.uint8) for x in each))

    def recent_tokens(self, budget: Int[Tensor, " B"]) -> Int[Tensor, " B"] | None:
        """Return how many newest tokens a step never evicts."""
        return torch.full_like(budget, self.recent) if self.recent else None
