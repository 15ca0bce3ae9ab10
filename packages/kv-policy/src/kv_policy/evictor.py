"""The common ground of eviction methods: one tier, a budget, the best tokens stay."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int, UInt8
from msgspec import Meta
from torch import Tensor

from kv_policy.budget import Budget
from kv_policy.contract import (
    DROP,
    NOBODY,
    Capabilities,
    LayerView,
    Observe,
    PlanView,
    Selector,
    Step,
    StepView,
)
from kv_policy.part import Part


def best(score: Float[Tensor, "*S L"], count: Int[Tensor, "*S"]) -> Bool[Tensor, "*S L"]:
    """Mark the `count` highest scores of each row; of equal ones the earlier stays.

    >>> best(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.tensor([2]))
    tensor([[False,  True,  True, False]])
    """
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(-1, order, torch.arange(score.shape[-1], device=score.device).expand_as(order))
    return rank < count[..., None]


def protect(
    score: Float[Tensor, "B H L"], view: LayerView, first: int = 0, last: int = 0
) -> Float[Tensor, "B H L"]:
    """Give the first tokens of a sequence and its most recent ones an infinite score."""
    newest = view.length[:, None, None]
    kept = (view.position < first) | (view.position >= newest - last)
    return score.masked_fill(kept & (view.position >= 0), torch.inf)


@dataclass(frozen=True)
class Evictor(Part):
    """Base of methods that score tokens per layer and keep the best `budget` of each head.

    A method is one `score`; it may change any of the class's other answers. What it protects gets
    an infinite score, and `protected` says how many tokens that can be.
    """

    budget: Annotated[
        Budget, Meta(description="kept per KV head: tokens, % or bytes a token (B)")
    ] = Budget(1024)

    def __post_init__(self) -> None:
        """Check the parameters, and the budget against what is protected."""
        super().__post_init__()
        if self.budget.unit == "tokens" and self.budget.amount < self.protected:
            raise ValueError(
                f"{self.name}: a budget of {self.budget} tokens is smaller than the "
                f"{self.protected} it protects (sinks and window); give at least that many"
            )

    @property
    def selector(self) -> Selector:
        """This method."""
        return self

    @property
    def capabilities(self) -> Capabilities:
        """An evicting cache is shorter than the sequence and depends on what came later."""
        return Capabilities(
            shortens=True,
            shares_prefixes=False,
            rolls_back=False,
            splits_heads=self.scope == "layer",
        )

    @property
    def tiers(self) -> Literal[1]:
        """Kept tokens are all stored alike."""
        return 1

    @property
    def protected(self) -> int:
        """Tokens per head that always stay."""
        return 0

    @property
    def observe(self) -> Observe:
        """Nothing, unless a method asks."""
        return Observe()

    @property
    def reads(self) -> frozenset[Literal["keys", "values"]]:
        """No vectors, unless a method asks."""
        return frozenset()

    @property
    def scope(self) -> Literal["layer", "model"]:
        """Each layer is planned alone."""
        return "layer"

    @property
    def decode(self) -> Literal["grow", "step"]:
        """Generated tokens join the cache."""
        return "grow"

    @property
    def replan(self) -> int:
        """Prompts only."""
        return 0

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Say what each token is worth; higher stays."""
        raise TypeError(f"{type(self).__name__} must define score(view)")

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Keep the best `budget` tokens of each head."""
        held = view.position >= 0
        score = view.score.masked_fill(~held, -torch.inf)
        count = view.budget[None, :, None].expand(score.shape[:-1])
        keep = best(score, count) & held
        return torch.where(keep, 0, DROP).to(torch.uint8)

    def cuts(self, view: PlanView) -> Float[Tensor, "K N B H"]:
        """Nothing: a step goes by the budget alone."""
        return view.score.new_zeros(self.tiers, *view.score.shape[:-1])

    def step(self, view: StepView) -> Step:
        """Take the candidate in, and let the weakest token go where the budget is full."""
        full = view.count[0] >= view.budget[None, :, None]
        weaker = full & (view.candidate <= view.weakest[0])
        candidate = torch.where(weaker, DROP, 0).to(torch.uint8)
        victim = torch.where(full & ~weaker, 0, NOBODY).to(torch.uint8)
        return Step(candidate, victim, torch.full_like(victim, DROP))
