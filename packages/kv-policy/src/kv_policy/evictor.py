"""The common ground of eviction methods: one tier, a budget, the best tokens stay."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Float64, Int, UInt8
from msgspec import Meta
from torch import Tensor

from kv_policy.budget import Budget
from kv_policy.contract import DROP, NOBODY, LayerView, PlanView, Step, StepView
from kv_policy.selecting import Selecting


def best(score: Float[Tensor, "*S L"], count: Int[Tensor, "*S"]) -> Bool[Tensor, "*S L"]:
    """Mark the `count` highest scores of each row; of equal ones the earlier stays.

    >>> best(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.tensor([2]))
    tensor([[False,  True,  True, False]])
    """
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(-1, order, torch.arange(score.shape[-1], device=score.device).expand_as(order))
    return rank < count[..., None]


def whole_tokens(given: Float64[Tensor, "*S"]) -> Int[Tensor, "*S"]:
    """Round tokens down; what is whole but for the rounding of a third or a tenth counts as whole.

    A batch adds shares up in another order than a row alone, so the two may differ in a last bit,
    and must not differ by a token.
    """
    return (given + 1e-6).floor().long()


def protect(
    score: Float[Tensor, "B H L"], view: LayerView, first: int = 0, last: int = 0
) -> Float[Tensor, "B H L"]:
    """Give the first tokens of a sequence and its most recent ones an infinite score."""
    newest = view.length[:, None, None]
    kept = (view.position < first) | (view.position >= newest - last)
    return score.masked_fill(kept & (view.position >= 0), torch.inf)


@dataclass(frozen=True)
class Evictor(Selecting):
    """Base of methods that score tokens per layer and keep the best `budget` of each head.

    A method is one `score`; it may change any of the class's other answers. The first `sinks` and
    the `recent` newest tokens always stay: a method sets them, as class attributes or as parameters
    of its own, and gives `protect(score, view)` as its score.
    """

    amounts: ClassVar[tuple[str, ...]] = ("budget",)

    budget: Annotated[
        Budget, Meta(description="kept per KV head: tokens, % or bytes a token (B)")
    ] = Budget(1024)

    def __post_init__(self) -> None:
        """Check the parameters, and the budget against what is protected."""
        super().__post_init__()
        if isinstance(self.recent, float) and not 0 <= self.recent <= 1:
            raise ValueError(
                f"{self.name}: recent={self.recent} is no share of the budget; give a whole number "
                "of tokens, or a share from 0.0 to 1.0"
            )
        if min(self.sinks, self.recent) < 0:
            raise ValueError(
                f"{self.name}: sinks={self.sinks} and recent={self.recent} are tokens that always "
                "stay; give 0 or more"
            )
        if self.budget.unit == "tokens" and self.budget.amount < self.protected:
            raise ValueError(
                f"{self.name}: a budget of {self.budget} tokens is smaller than the "
                f"{self.protected} it protects (sinks and window); give at least that many"
            )

    @property
    def sinks(self) -> int:
        """First tokens of a sequence that always stay."""
        return 0

    @property
    def recent(self) -> int | float:
        """Newest tokens that always stay: how many; a float is a share of the budget."""
        return 0

    @property
    def protected(self) -> int:
        """The sinks and the newest tokens; a share of the budget fits into any."""
        return self.sinks + self._newest

    @property
    def _newest(self) -> int:
        return self.recent if isinstance(self.recent, int) else 0

    def protect(self, score: Float[Tensor, "B H L"], view: LayerView) -> Float[Tensor, "B H L"]:
        """Give the sinks an infinite score, and the newest tokens if they stay the newest.

        Under steps they do not: `recent_tokens` keeps them until they are newest no more.
        """
        last = self._newest if self.decode == "grow" else 0
        return protect(score, view, first=self.sinks, last=last)

    def recent_tokens(self, budget: Int[Tensor, " B"]) -> Int[Tensor, " B"] | None:
        """The newest tokens, which stay whatever their scores; None: there are none."""
        if isinstance(self.recent, float):
            return whole_tokens(budget.double() * self.recent)
        return torch.full_like(budget, self.recent) if self.recent else None

    @classmethod
    def keeping(cls, share: Budget) -> dict[str, Any]:
        """Keep a share of the tokens seen: a budget in percent."""
        return {"budget": share}

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Say how many tokens each head keeps: the budget, unless a method shares it out."""
        return view.budget[None, :, None].expand(view.score.shape[:-1])

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Keep the best tokens of each head, as many as `counts` says; sinks and newest first."""
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
        """Take the candidate in, and let the weakest token go where the budget is full."""
        full = view.count[0] >= view.budget[None, :, None]
        weaker = full & (view.candidate <= view.weakest[0])
        recent = self.recent_tokens(view.budget)
        if recent is not None:
            weaker &= (recent == 0)[None, :, None]  # the candidate is itself recent
        candidate = torch.where(weaker, DROP, 0).to(torch.uint8)
        victim = torch.where(full & ~weaker, 0, NOBODY).to(torch.uint8)
        return Step(candidate, victim, torch.full_like(victim, DROP))
