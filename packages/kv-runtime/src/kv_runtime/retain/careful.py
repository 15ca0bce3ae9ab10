"""A selector that fails about one sequence of a batch, asked about the others all the same."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import (
    DROP,
    NOBODY,
    CompleteSelector,
    LayerView,
    Queries,
    Selector,
    Step,
    StepView,
)

View = TypeVar("View", LayerView, StepView)


class Careful(CompleteSelector):
    """Asks a selector about all sequences, and where it fails about each alone.

    A row of a view is answered as it would be alone, so nothing else changes for the others. Who
    fails alone is noted, and its tokens get scores of 0 and stay where they are. This is so while
    tokens are generated: a prompt is one sequence where it matters, and its failure is raised.
    """

    def __init__(self, selector: Selector, sequences: int = 1) -> None:
        """Start for a batch of so many sequences."""
        super().__init__(selector)
        self._own_step = self.step
        self.score, self.step = self._score, self._step
        self.sequences = sequences
        self.errors: dict[int, Exception] = {}  # by the sequence that failed

    def _score(self, view: LayerView) -> Float[Tensor, "B H L"]:
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

    def _step(self, view: StepView) -> Step:
        """Place the candidates of all sequences, or of each alone."""
        try:
            return self._own_step(view)
        except Exception as error:
            self._expect_others(error)
        drop = torch.full_like(view.candidate, DROP, dtype=torch.uint8)
        found = Step(drop, torch.full_like(drop, NOBODY), drop.clone())
        for i in self._asked():
            row = torch.tensor([i], device=drop.device)
            try:
                answer = self._own_step(_rows(view, row, -2))
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
