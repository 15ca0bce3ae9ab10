"""What a selector asks for while a sequence lives: observation, running scores, replans."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor


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


@dataclass(frozen=True, slots=True)
class RunningMean:
    """What a token is worth is the mean of what the queries after it gave it.

    Attributes:
        last: as how many queries a token's past counts at most; None: as many as there were. With
            it, what later queries say replaces what earlier ones said, gradually.
    """

    last: int | None = None

    def update(
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

    def update(
        self,
        score: Float[Tensor, "*n L"],
        position: Int[Tensor, "*n L"],
        before: Int[Tensor, "*before 1"],
        mass: Float[Tensor, "*n L"],
        seen: Int[Tensor, "*n L"],
    ) -> Float[Tensor, "*n L"]:
        """Give the sums with the queries of a pass in them; see `RunningMean.update`."""
        return (score + mass / self.over).masked_fill_(position < 0, 0)


Running: TypeAlias = RunningMean | RunningSum


@dataclass(frozen=True, slots=True)
class Replan:
    """After prompts only, unless one of the first three says more (KV-Compress, section 4.2.3).

    Sequences that are due are planned oldest plan first, those that were never planned before all
    others. A sequence that would take a plan beyond `most` waits for the next forward pass, and
    keeps all its tokens until then; one that has more alone is planned alone. Where pages are short
    no more sequences are planned than free what is short, in the same order.
    """

    every: int = 0  # plan all sequences after so many forward passes that generate; 0: never
    uncompressed: int = 0  # plan all once so many tokens of the batch came after a plan; 0: never
    short: bool = False  # plan when the pool has no page left for a step
    most: int | None = None  # tokens over all layers and heads that one plan takes; None: any

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("every", "uncompressed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; say 0 for never, or a number")
        if self.most is not None and self.most < 1:
            raise ValueError(f"most is {self.most}; a plan takes at least 1 token, or None: any")

    @property
    def generating(self) -> bool:
        """Whether anything is planned while tokens are generated, but for what waited."""
        return bool(self.every or self.uncompressed or self.short)
