"""What a selector requests over a sequence's lifetime: sums of attention, a replay, replans."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Observe:
    """Attention probabilities that a policy wants summed per token during attention.

    For each counted query a token's probabilities, raised to `power`, are reduced over the query
    heads of the KV head by `group`, and the results are summed over the counted queries. With
    "max-of-sums" the probabilities are summed over the queries of the pass first and the maximum of
    the group is taken afterwards. A query counts for a token if it is among the `last` queries of
    the forward pass (None: all of them; 0: none), is not before the token, and is at least `skip`
    positions after it.

    With `above` each probability counts as 1 if it exceeds `above` times the uniform probability
    over the tokens visible to the query (those before it and itself), else as 0. `also` requests
    further sums, of squares or of -p log p. With `gumbel` the probabilities come from logits with
    added Gumbel noise, divided by that temperature; the noise of a (query, token) pair is fixed.
    """

    last: int | None = 0
    group: Literal["sum", "mean", "max", "max-of-sums"] = "mean"
    power: Literal[1, 2] = 1
    skip: int = 0
    generated: bool = False  # observe every generated query too
    above: float | None = None
    gumbel: float | None = None
    also: frozenset[Literal["squares", "entropy"]] = frozenset()

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.last is not None and self.last < 0:
            raise ValueError(f"last is {self.last}; use a number of queries, or None for all")
        if self.skip < 0:
            raise ValueError(f"skip is {self.skip}; it must be 0 or more")
        if self.group not in ("sum", "mean", "max", "max-of-sums"):
            raise ValueError(f"group is {self.group!r}; use sum, mean, max or max-of-sums")
        if self.power not in (1, 2):
            raise ValueError(f"power is {self.power}; use 1 or 2")
        if self.above is not None and not (self.above > 0 and self.power == 1):
            raise ValueError(
                f"above is {self.above} and power {self.power}; above must be greater than 0, "
                "with power=1"
            )
        if self.gumbel is not None and not self.gumbel > 0:
            raise ValueError(f"gumbel is {self.gumbel}; a temperature must be above 0")
        if not self.also <= {"squares", "entropy"}:
            raise ValueError(f"also is {set(self.also)}; it may hold squares and entropy")


@dataclass(frozen=True, slots=True)
class RunningMean:
    """A token's score is the mean of the attention mass that the queries after it gave it.

    Attributes:
        last: upper limit of the weight of past queries, in queries; None: their number. With a
            limit the mean becomes an exponential moving average.
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
        """Return the means updated with the queries of a pass; 0 in empty slots.

        Args:
            score: the means so far.
            position: of the tokens, -1 for empty slots.
            before: tokens of the sequence before the pass; broadcast over `*n`.
            mass: attention mass of the queries of the pass, without a token's own query.
            seen: queries counted in `mass`.
        """
        past = (before - 1 - position).clamp_(min=0, max=self.last).float()
        total = (score * past).add_(mass)
        return total.div_(past.add_(seen).clamp_(min=1)).masked_fill_(position < 0, 0)


@dataclass(frozen=True, slots=True)
class RunningSum:
    """A token's score is the sum of the attention mass it received, divided by `over`.

    Attributes:
        over: the divisor, such as the number of queries in the observation window.
    """

    over: int = 1

    def __post_init__(self) -> None:
        """Check the divisor.

        Raises:
            ValueError: `over` is below 1.
        """
        if self.over < 1:
            raise ValueError(f"over={self.over} must be 1 or more, as sums are divided by it")

    def update(
        self,
        score: Float[Tensor, "*n L"],
        position: Int[Tensor, "*n L"],
        before: Int[Tensor, "*before 1"],
        mass: Float[Tensor, "*n L"],
        seen: Int[Tensor, "*n L"],
    ) -> Float[Tensor, "*n L"]:
        """Return the sums updated with the queries of a pass; see `RunningMean.update`."""
        return (score + mass / self.over).masked_fill_(position < 0, 0)


Running: TypeAlias = RunningMean | RunningSum


@dataclass(frozen=True, slots=True)
class Replan:
    """When a policy plans: after prompts, and as the first three fields add (KV-Compress, 4.2.3).

    Due sequences are planned in order of their oldest plan, those never planned first. A sequence
    that would exceed `most` in a plan waits for the next forward pass and keeps all its tokens
    until then; one that exceeds it alone is planned alone. When pages run short, sequences are
    planned in the same order until enough pages are free.
    """

    every: int = 0  # plan all sequences after this many decode steps; 0: never
    uncompressed: int = 0  # plan all after this many new tokens in the batch; 0: never
    short: bool = False  # plan when the pool has no free page for a step
    most: int | None = None  # tokens over all layers and heads per plan; None: no limit

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("every", "uncompressed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use 0 for never, or a number")
        if self.most is not None and self.most < 1:
            raise ValueError(f"most is {self.most}; use at least 1 token, or None for no limit")

    @property
    def generating(self) -> bool:
        """Whether plans run during generation, apart from sequences that waited."""
        return bool(self.every or self.uncompressed or self.short)


@dataclass(frozen=True, slots=True)
class Replay:
    """A second reading of a prompt, whose queries show which tokens the model needs to repeat it.

    After the pass over a prompt, and before its tokens are planned, the model reads the prompt
    again, chunk by chunk, each after an instruction to repeat it. A chunk attends to all tokens of
    the sequence, to its instruction and to itself; nothing of it is stored. Positions continue
    after the prompt. For each token of the chunk in the prompt, the largest probability that a
    query of instruction and chunk gives it is the token's `LayerView.replayed`, over all query
    heads of its KV head; probabilities are normalized over the chunk in the prompt, the
    instruction and the chunk itself.

    Attributes:
        first: the instruction before the first chunk.
        later: the instruction before each later chunk, which ends with the last `quoted` tokens of
            the chunk before it.
        quoted: number of tokens quoted.
        tokens: tokens of the prompt per chunk.
    """

    first: str
    later: str
    quoted: int = 8
    tokens: int = 2048

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a chunk has no token, or fewer than are quoted of it.
        """
        if self.quoted < 0:
            raise ValueError(f"quoted is {self.quoted}; quote 0 or more tokens")
        if self.tokens < max(1, self.quoted):
            raise ValueError(
                f"chunks of {self.tokens} tokens are too short; give at least 1 token, and the "
                f"{self.quoted} that are quoted of a chunk"
            )
