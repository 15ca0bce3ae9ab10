"""Composition of two selectors: one evicts tokens, the other sorts the rest into tiers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_policy.budget import Budget
from kv_policy.complete import CompleteSelector, complete
from kv_policy.contract import (
    DROP,
    LayerView,
    Merge,
    MergeView,
    PlanView,
    Selector,
    Step,
    StepView,
    VectorName,
)
from kv_policy.lifecycle import Observe, Replan, Replay, Running


@dataclass(frozen=True)
class SortedSelector:
    """Sort tokens into tiers as `sorter` does, by the scores of `evictor`, which evicts tokens.

    The sorter sees every token, so its shares and thresholds refer to the whole prompt; the evictor
    then plans over the sorted tokens and drops those beyond its budget. During generation, the
    sorter's steps place tokens by the evictor's scores, for which generated queries are observed;
    the evictor drops tokens when it plans again, if its `replan` asks for that.
    """

    evictor: Selector
    sorter: Selector

    @cached_property
    def _evictor(self) -> CompleteSelector:
        return complete(self.evictor)

    @cached_property
    def _sorter(self) -> CompleteSelector:
        return complete(self.sorter)

    @property
    def tiers(self) -> int:
        """The sorter's."""
        return self._sorter.tiers

    @property
    def budget(self) -> Budget | None:
        """The evictor's."""
        return self._evictor.budget

    @property
    def protected(self) -> int:
        """The evictor's protected tokens."""
        return self._evictor.protected

    @property
    def observe(self) -> Observe:
        """The evictor's; generated queries too if tokens are placed by steps of their scores."""
        steps = self._sorter.decode == "step" and not self.scores_once
        return replace(self._evictor.observe, generated=steps or self._evictor.observe.generated)

    @property
    def replay(self) -> Replay | None:
        """The evictor's, as its scores are used."""
        return self._evictor.replay

    @property
    def reads(self) -> frozenset[VectorName]:
        """The evictor's."""
        return self._evictor.reads

    @property
    def needs_rope(self) -> bool:
        """The evictor's."""
        return self._evictor.needs_rope

    @property
    def scores_once(self) -> bool:
        """The evictor's."""
        return self._evictor.scores_once

    @property
    def scores_last(self) -> bool:
        """The evictor's, as its scores are used."""
        return self._evictor.scores_last

    @property
    def adjust(self) -> Callable[[LayerView], Float[Tensor, "B H L"]] | None:
        """The evictor's, as its scores are used."""
        return self._evictor.adjust

    @property
    def rescore(self) -> Callable[[LayerView], Float[Tensor, "B H L"]] | None:
        """The evictor's, for its plan; the sorter plans by the stored scores, as its steps do."""
        return self._evictor.rescore

    @property
    def merge(self) -> Callable[[MergeView], Merge] | None:
        """The evictor's, as its plan drops tokens."""
        return self._evictor.merge

    @property
    def scope(self) -> Literal["layer", "model"]:
        """All layers together, if either selector plans them so."""
        return "model" if "model" in (self._evictor.scope, self._sorter.scope) else "layer"

    @property
    def decode(self) -> Literal["grow", "step"]:
        """The sorter's."""
        return self._sorter.decode

    @property
    def decodes_on_device(self) -> bool:
        """Whether both do."""
        return self._evictor.decodes_on_device and self._sorter.decodes_on_device

    @property
    def victim_tiers(self) -> int:
        """The sorter's."""
        return self._sorter.victim_tiers

    @property
    def replan(self) -> Replan:
        """The evictor's."""
        return self._evictor.replan

    @property
    def running(self) -> Running | None:
        """The evictor's, as its scores are used."""
        return self._evictor.running

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the evictor's scores."""
        return self._evictor.score(view)

    def head_stats(self, view: LayerView) -> Float[Tensor, "B H"] | None:
        """Return the evictor's head statistics."""
        return self._evictor.head_stats(view)

    def recent_tokens(self, budget: Int[Tensor, " B"]) -> Int[Tensor, " B"] | None:
        """Return the sorter's: its steps move tokens."""
        return self._sorter.recent_tokens(budget)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Sort the tokens into tiers, and drop those beyond the budget."""
        tier = self._sorter.plan(_as_stored(view))
        rest = replace(view, tier=tier, position=view.position.masked_fill(tier == DROP, -1))
        gone = self._evictor.plan(rest) == DROP
        return tier.masked_fill(gone, DROP)

    def tier_thresholds(self, view: PlanView) -> Float[Tensor, "K N B H"] | None:
        """Return the sorter's thresholds over all tokens."""
        return self._sorter.tier_thresholds(_as_stored(view))

    def step(self, view: StepView) -> Step:
        """Return the sorter's step."""
        return self._sorter.step(view)


def _as_stored(view: PlanView) -> PlanView:
    """Return the view with the stored scores."""
    return view if view.stored_score is None else replace(view, score=view.stored_score)
