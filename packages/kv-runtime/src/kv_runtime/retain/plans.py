"""The state of a selector's plans between passes, to save and to restore."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import Budget


@dataclass(frozen=True)
class TurnCounts:
    """When each sequence was last planned, and which are due; counts are of passes.

    Attributes:
        planned: the pass of the last plan of each sequence, 0 before the first.
        due: whether each is to be planned.
        steps: decode passes of each since it became due.
        passes: passes of the batch.
        tokens: tokens generated since all became due, over the batch.
    """

    planned: tuple[int, ...]
    due: tuple[bool, ...]
    steps: tuple[int, ...]
    passes: int
    tokens: int

    def expect(self, sequences: int) -> None:
        """Raise unless there is a count for each sequence, and each is possible.

        Raises:
            ValueError: a count is missing, negative or too large.
        """
        each = (self.planned, self.due, self.steps)
        counts = (*self.planned, *self.steps, self.passes, self.tokens)
        if any(len(x) != sequences for x in each) or not all(0 <= x < 2**62 for x in counts):
            raise ValueError(f"the counts of plans do not fit {sequences} sequences: {self}")


@dataclass(frozen=True)
class Plans:
    """What a selector's storage keeps between passes, beside the tokens.

    Attributes:
        turns: which sequences are due.
        budgets: budgets of the sequences, None for the policy's; None: the policy's for all.
        budget: tokens per head, last resolved; int64.
        thresholds: of the last plan, by tier.
    """

    turns: TurnCounts
    budgets: tuple[Budget | None, ...] | None
    budget: Int[Tensor, " B"] | None
    thresholds: Float[Tensor, "K N B H"] | None

    @property
    def budget_texts(self) -> tuple[str | None, ...] | None:
        """The budgets of the sequences as text."""
        if self.budgets is None:
            return None
        return tuple(None if each is None else str(each) for each in self.budgets)
