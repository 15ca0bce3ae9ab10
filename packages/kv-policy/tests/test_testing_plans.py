"""The conformance check detects each law that plans can break."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kv_policy import DROP, Capabilities, PlanView
from lawful import Good, refusal


class Greedy(Good):
    def plan(self, view: PlanView) -> Tensor:
        return super().plan(replace(view, budget=view.budget + 1))


class Stingy(Good):
    def plan(self, view: PlanView) -> Tensor:
        plan = super().plan(view)
        return torch.where(view.position == 0, DROP, plan)


class Unpadded(Good):
    def plan(self, view: PlanView) -> Tensor:
        return torch.where(view.position >= 0, super().plan(view), 0).to(torch.uint8)


class Lost(Good):
    def plan(self, view: PlanView) -> Tensor:
        return torch.where(super().plan(view) == 0, 1, DROP).to(torch.uint8)


class Wide(Good):
    def plan(self, view: PlanView) -> Tensor:
        return super().plan(view).long()


class Shares(Good):
    """Sequences of a batch share the smallest budget."""

    def plan(self, view: PlanView) -> Tensor:
        return super().plan(replace(view, budget=view.budget.min().expand_as(view.budget)))


class Random(Good):
    def plan(self, view: PlanView) -> Tensor:
        scores = torch.rand_like(view.score).where(view.score < torch.inf, torch.inf)
        return super().plan(replace(view, score=scores))


class Mute(Good):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()


class Rises(Good):
    @property
    def tiers(self) -> int:
        return 2


class Hasty(Good):
    """Keeps a share of the tokens seen, and so more of a text when the rest is known."""

    plans_chunks = True

    def plan(self, view: PlanView) -> Tensor:
        share = torch.minimum(view.budget, (view.length // 3).clamp(min=self.protected))
        return super().plan(replace(view, budget=share))


class Small(Good):
    @property
    def protected(self) -> int:
        return 2000

    def __post_init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Greedy, "its budget of 3 per head allows 12"),
        (Stingy, "plan drops a protected token, whose score is infinite"),
        (Unpadded, "plan keeps an empty slot"),
        (Lost, "plan sends tokens to a tier other than 0 to 0 and DROP"),
        (Wide, "plan returns torch.int64"),
        (Shares, "plans of a sequence depend on the other sequences"),
        (Random, "plan differs on a second call"),
        (Mute, "plan drops tokens, but the capabilities have shortens=False"),
        (Rises, "plan moves a stored token to an earlier tier than its own"),
        (Hasty, "plan drops a token after a chunk of a prompt that it keeps after the whole"),
        (Small, "the budget of 1024 tokens is below the 2000 protected"),
    ],
)
def test_a_broken_policy_is_told_its_law(broken: type[Good], law: str) -> None:
    assert law in refusal(broken())
