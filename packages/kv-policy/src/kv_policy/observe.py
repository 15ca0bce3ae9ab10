"""What a policy asks to be watched while the model attends."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Observe:
    """Which attention probabilities a policy wants summed per token while the model attends.

    Each counted query gives a token its probability to the `power`, reduced over the query heads
    of the token's KV head by `group`; these are summed over the counted queries. With "max-of-sums"
    the sum over the queries of the pass comes first, and the largest of the group's sums is given.
    A query counts for a token if it is among the `last` queries of the forward pass (None: all of
    them; 0: none), does not come before the token, and is at least `skip` positions after it.

    With `above` it gives 1 instead where its probability is more than `above` times an even share
    of the tokens it has before it and its own, else 0. `also` asks for more sums, of squares or of
    -p log p, next to the first. With `gumbel` the probabilities are those of logits to which Gumbel
    noise was added, over that temperature; the noise of a query and a token is always the same.
    """

    last: int | None = 0
    group: Literal["sum", "mean", "max", "max-of-sums"] = "mean"
    power: Literal[1, 2] = 1
    skip: int = 0
    generated: bool = False  # go on with every generated query
    above: float | None = None
    gumbel: float | None = None
    also: frozenset[Literal["squares", "entropy"]] = frozenset()

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.last is not None and self.last < 0:
            raise ValueError(f"last is {self.last}; say how many queries to watch, or None for all")
        if self.skip < 0:
            raise ValueError(f"skip is {self.skip}; it must be 0 or more")
        if self.group not in ("sum", "mean", "max", "max-of-sums"):
            raise ValueError(f"group is {self.group!r}; say sum, mean, max or max-of-sums")
        if self.power not in (1, 2):
            raise ValueError(f"power is {self.power}; say 1 or 2")
        if self.above is not None and not (self.above > 0 and self.power == 1):
            raise ValueError(
                f"above is {self.above} and power {self.power}; count what is above a share "
                "greater than 0, with power=1"
            )
        if self.gumbel is not None and not self.gumbel > 0:
            raise ValueError(f"gumbel is {self.gumbel}; a temperature is above 0")
        if not self.also <= {"squares", "entropy"}:
            raise ValueError(f"also is {set(self.also)}; it may hold squares and entropy")
