"""A selector that fails about one sequence of a batch, asked about the others all the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_policy import (
    DROP,
    NOBODY,
    Budget,
    LayerView,
    Observe,
    PlanView,
    Queries,
    Replan,
    Running,
    Selector,
    Step,
    StepView,
    Vectors,
)

View = TypeVar("View", LayerView, StepView)


@dataclass(slots=True)
class Careful:
    """Asks a selector about all sequences, and where it fails about each alone.

    A row of a view is answered as it would be alone, so nothing else changes for the others. Who
    fails alone is noted, and its tokens get scores of 0 and stay where they are. This is so while
    tokens are generated: a prompt is one sequence where it matters, and its failure is raised.
    """

    selector: Selector
    sequences: int = 1  # of the batch
    errors: dict[int, Exception] = field(default_factory=dict)  # by the sequence that failed

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Score all sequences, or each alone; rows are a layer's sequences after another's."""
        try:
            return self.selector.score(view)
        except Exception as error:
            self._expect_others(error)
        found = torch.zeros_like(view.score)
        for i in self._asked():
            rows = torch.arange(i, len(found), self.sequences, device=found.device)
            try:
                found[rows] = self.selector.score(_rows(view, rows, 0)).to(found.dtype)
            except Exception as error:
                self.errors[i] = error
        return found

    def step(self, view: StepView) -> Step:
        """Place the candidates of all sequences, or of each alone."""
        try:
            return self.selector.step(view)
        except Exception as error:
            self._expect_others(error)
        drop = torch.full_like(view.candidate, DROP, dtype=torch.uint8)
        found = Step(drop, torch.full_like(drop, NOBODY), drop.clone())
        for i in self._asked():
            row = torch.tensor([i], device=drop.device)
            try:
                answer = self.selector.step(_rows(view, row, -2))
            except Exception as error:
                self.errors[i] = error
                continue
            for each in fields(found):
                getattr(found, each.name)[:, row] = getattr(answer, each.name)
        return found

    def _expect_others(self, error: Exception) -> None:
        """Raise what is not about one sequence of several."""
        if self.sequences == 1 or isinstance(error, torch.AcceleratorError):
            raise error

    def _asked(self) -> list[int]:
        return [i for i in range(self.sequences) if i not in self.errors]

    # The rest is the selector's.

    @property
    def tiers(self) -> int:
        """The selector's."""
        return self.selector.tiers

    @property
    def budget(self) -> Budget | None:
        """The selector's."""
        return self.selector.budget

    @property
    def protected(self) -> int:
        """The selector's."""
        return self.selector.protected

    @property
    def observe(self) -> Observe:
        """The selector's."""
        return self.selector.observe

    @property
    def reads(self) -> frozenset[Vectors]:
        """The selector's."""
        return self.selector.reads

    @property
    def scope(self) -> Literal["layer", "model"]:
        """The selector's."""
        return self.selector.scope

    @property
    def decode(self) -> Literal["grow", "step"]:
        """The selector's."""
        return self.selector.decode

    @property
    def replan(self) -> Replan:
        """The selector's."""
        return self.selector.replan

    @property
    def running(self) -> Running | None:
        """The selector's."""
        return self.selector.running

    def gauge(self, view: LayerView) -> Float[Tensor, "B H"]:
        """The selector's."""
        return self.selector.gauge(view)

    def shielded(self, budget: Int[Tensor, " B"]) -> Int[Tensor, " B"] | None:
        """The selector's."""
        return self.selector.shielded(budget)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """The selector's."""
        return self.selector.plan(view)

    def cuts(self, view: PlanView) -> Float[Tensor, "K N B H"]:
        """The selector's."""
        return self.selector.cuts(view)


def _rows(view: View, rows: Int[Tensor, " r"], axis: int) -> View:
    """Give some sequences of a view; what has one axis counts them there."""

    def taken(given: Any) -> Any:
        if isinstance(given, Tensor):
            return given.index_select(axis if given.dim() > 1 else 0, rows)
        if isinstance(given, Mapping):
            return {name: taken(each) for name, each in given.items()}
        if isinstance(given, Queries):
            return Queries(taken(given.vectors), taken(given.position))
        return given

    return replace(view, **{each.name: taken(getattr(view, each.name)) for each in fields(view)})
