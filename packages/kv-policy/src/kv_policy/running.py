"""Scores that are averages over queries and go on from pass to pass."""

from dataclasses import dataclass

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
