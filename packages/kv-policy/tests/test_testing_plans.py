"""The conformance check detects each law that plans can break."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kv_policy import DROP, FRESH, Capabilities, LayerView, PlanView
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


class Hindsight(Good):
    """Scores tokens by their distance from the end."""

    plans_chunks = True

    def score(self, view: LayerView) -> Tensor:
        score = super().score(view)
        return score - (view.length[:, None, None] - view.position) * 0.01


class Generous(Good):
    """Keeps one more where an earlier plan filled the budget."""

    plans_chunks = True

    def plan(self, view: PlanView) -> Tensor:
        stored = ((view.position >= 0) & (view.tier != FRESH)).sum(-1)
        full = (stored == view.budget[None, :, None]).flatten(2).all(-1).all(0)
        return super().plan(replace(view, budget=view.budget + full.long()))


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
        (Hasty, "keep other tokens than one plan after the whole, though plans_chunks is True"),
        (Hindsight, "score of a token changes with the rest of its prompt, though plans_chunks"),
        (Generous, "its budget of 3 per head allows 12"),
        (Small, "the budget of 1024 tokens is below the 2000 protected"),
    ],
)
def test_a_broken_policy_is_told_its_law(broken: type[Good], law: str) -> None:
    assert law in refusal(broken())
