"""Isolation of a selector's errors to single sequences of a batch."""

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
    """Calls a selector for all sequences, and after an error for each sequence separately.

    The result of a row does not depend on the others, so the other sequences are unaffected. A
    sequence that raises is recorded; its tokens get a score of 0 and are not moved. This applies to
    decode steps: a prompt is a single sequence in this case, and its error is raised.
    """

    def __init__(self, selector: Selector, sequences: int = 1) -> None:
        """Wrap a selector for a batch of `sequences` sequences."""
        super().__init__(selector)
        self._own_step = self.step
        self.score, self.step = self._score, self._step
        self.sequences = sequences
        self.errors: dict[int, Exception] = {}  # by failed sequence

    def _score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Score all sequences, or each separately; rows are sequences, grouped by layer."""
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
        """Place the candidates of all sequences, or of each separately."""
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
        """Raise an error that cannot be isolated to one of several sequences."""
        if self.sequences == 1 or isinstance(error, torch.AcceleratorError):
            raise error

    def _asked(self) -> list[int]:
        return [i for i in range(self.sequences) if i not in self.errors]


def _rows(view: View, rows: Int[Tensor, " r"], axis: int) -> View:
    """Return some sequences of a view; one-dimensional tensors are indexed by sequence."""

    def taken(given: Any) -> Any:
        if isinstance(given, Tensor):
            return given.index_select(axis if given.dim() > 1 else 0, rows)
        if isinstance(given, Mapping):
            return {name: taken(each) for name, each in given.items()}
        if isinstance(given, Queries):
            return Queries(taken(given.vectors), taken(given.position))
        return given

    return replace(view, **{each.name: taken(getattr(view, each.name)) for each in fields(view)})
