"""Scores that go on from pass to pass: means over queries, and sums."""

from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RunningMean:
    """What a token is worth is the mean of what the queries after it gave it.

    Attributes:
        last: as how many queries a token's past counts at most; None: as many as there were. With
            it, what later queries say replaces what earlier ones said, gradually.
    """

    last: int | None = None

    def go_on(
        self,
        score: Float[Tensor, "*n L"],
        position: Int[Tensor, "*n L"],
        before: Int[Tensor, "*before 1"],
        mass: Float[Tensor, "*n L"],
        seen: Int[Tensor, "*n L"],
    ) -> Float[Tensor, "*n L"]:
        """Give the means with the queries of a pass in them; 0 at places without a token.

        Args:
            score: the means so far.
            position: of the tokens, -1 for none.
            before: tokens of the sequence before the pass; broadcast over `*n`.
            mass: what the queries of the pass gave, none of a token's own query in it.
            seen: how many of them counted.
        """
        past = (before - 1 - position).clamp_(min=0, max=self.last).float()
        total = (score * past).add_(mass)
        return total.div_(past.add_(seen).clamp_(min=1)).masked_fill_(position < 0, 0)


@dataclass(frozen=True, slots=True)
class RunningSum:
    """What a token is worth is the sum of what queries gave it, in parts of a number of them.

    Attributes:
        over: what the sum is divided by, such as the queries of the window that began it.
    """

    over: int = 1

    def __post_init__(self) -> None:
        """Check the divisor.

        Raises:
            ValueError: `over` is below 1.
        """
        if self.over < 1:
            raise ValueError(f"over={self.over} cannot divide a sum of scores; give 1 or more")

    def go_on(
        self,
        score: Float[Tensor, "*n L"],
        position: Int[Tensor, "*n L"],
        before: Int[Tensor, "*before 1"],
        mass: Float[Tensor, "*n L"],
        seen: Int[Tensor, "*n L"],
    ) -> Float[Tensor, "*n L"]:
        """Give the sums with the queries of a pass in them; see `RunningMean.go_on`."""
        return (score + mass / self.over).masked_fill_(position < 0, 0)


Running: TypeAlias = RunningMean | RunningSum
