"""Base of eviction methods: one tier, a budget, the highest scores are kept."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Float64, Int, UInt8
from msgspec import Meta
from torch import Tensor

from kv_policy.budget import Budget
from kv_policy.contract import DROP, NOBODY, LayerView, PlanView, Step, StepView
from kv_policy.ordering import best
from kv_policy.selecting import Selecting


def whole_tokens(given: Float64[Tensor, "*S"]) -> Int[Tensor, "*S"]:
    """Round down to whole tokens; values that are whole up to rounding count as whole.

    A batch sums shares in another order than a single row, so results may differ in the last bit;
    they must not differ by a token.
    """
    return (given + 1e-6).floor().long()


def protect(
    score: Float[Tensor, "B H L"], view: LayerView, first: int = 0, last: int = 0
) -> Float[Tensor, "B H L"]:
    """Set the score of the first tokens and of the most recent ones to infinity."""
    newest = view.length[:, None, None]
    kept = (view.position < first) | (view.position >= newest - last)
    return score.masked_fill(kept & (view.position >= 0), torch.inf)


@dataclass(frozen=True)
class Evictor(Selecting):
    """Base of methods that score tokens per layer and keep the best `budget` of each head.

    A method defines `score` and may override any other member. The first `sinks` and the `recent`
    newest tokens are always kept: a method sets both as class attributes or as its own parameters
    and returns `protect(score, view)` as its score.
    """

    amounts: ClassVar[tuple[str, ...]] = ("budget",)

    budget: Annotated[
        Budget, Meta(description="kept per KV head: tokens, % or bytes a token (B)")
    ] = Budget(1024)

    def __post_init__(self) -> None:
        """Check the parameters, and the budget against the protected tokens."""
        super().__post_init__()
        if isinstance(self.recent, float) and not 0 <= self.recent <= 1:
            raise ValueError(
                f"{self.name}: recent={self.recent} is not a share of the budget; use a whole "
                "number of tokens, or a share from 0.0 to 1.0"
            )
        if min(self.sinks, self.recent) < 0:
            raise ValueError(
                f"{self.name}: sinks={self.sinks} and recent={self.recent} count protected tokens; "
                "use 0 or more"
            )
        if self.budget.unit == "tokens" and self.budget.amount < self.protected:
            raise ValueError(
                f"{self.name}: a budget of {self.budget} tokens is smaller than the "
                f"{self.protected} it protects (sinks and window); use at least that many"
            )
        if self.plans_chunks:
            self.budget.expect_tokens(self.name)

    @property
    def sinks(self) -> int:
        """First tokens of a sequence that are always kept (attention sinks)."""
        return 0

    @property
    def recent(self) -> int | float:
        """Newest tokens that are always kept; an int is a count, a float a share of the budget."""
        return 0

    @property
    def protected(self) -> int:
        """Sinks and newest tokens; a recent share of the budget counts as 0."""
        return self.sinks + self._newest

    @property
    def _newest(self) -> int:
        return self.recent if isinstance(self.recent, int) else 0

    def protect(self, score: Float[Tensor, "B H L"], view: LayerView) -> Float[Tensor, "B H L"]:
        """Set the score of sinks to infinity, and of the newest tokens unless `decode` is "step".

        With steps the newest tokens change; `recent_tokens` keeps them from being victims.
        """
        last = self._newest if self.decode == "grow" else 0
        return protect(score, view, first=self.sinks, last=last)

    def recent_tokens(self, budget: Int[Tensor, " B"]) -> Int[Tensor, " B"] | None:
        """Return the number of newest tokens kept regardless of score; None: no such tokens."""
        if isinstance(self.recent, float):
            return whole_tokens(budget.double() * self.recent)
        return torch.full_like(budget, self.recent) if self.recent else None

    @classmethod
    def keeping(cls, share: Budget) -> dict[str, Any]:
        """Return the parameters that keep a share of the tokens seen: a budget in percent."""
        return {"budget": share}

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Return the tokens kept per head: the budget, unless a method distributes it."""
        return view.budget[None, :, None].expand(view.score.shape[:-1])

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Keep the best `counts` tokens of each head; sinks and newest tokens first."""
        held = view.position >= 0
        score = view.score.masked_fill(~held, -torch.inf)
        recent = self.recent_tokens(view.budget)
        if recent is not None:
            newest = (view.length - recent)[None, :, None, None]
            score = score.masked_fill(held & (view.position >= newest), torch.inf)
        if self.sinks:
            score = score.masked_fill(held & (view.position < self.sinks), torch.inf)
        keep = best(score, self.counts(view)) & held
        return torch.where(keep, 0, DROP).to(torch.uint8)

    def step(self, view: StepView) -> Step:
        """Admit the candidate, and evict the weakest token where the budget is full."""
        full = view.count[0] >= view.budget[None, :, None]
        weaker = full & (view.candidate <= view.weakest[0])
        recent = self.recent_tokens(view.budget)
        if recent is not None:
            weaker &= (recent == 0)[None, :, None]  # the candidate is itself recent
        candidate = torch.where(weaker, DROP, 0).to(torch.uint8)
        victim = torch.where(full & ~weaker, 0, NOBODY).to(torch.uint8)
        return Step(candidate, victim, torch.full_like(victim, DROP))
