"""Dense tokens as input of attention, and its result."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseTokens:
    """Tokens in dense tensors: the raw window, or the new chunk of a forward pass.

    A token is visible to the queries at its position or later. A slot with position -1 is empty,
    and its contents have no effect.

    `full` states whether every slot holds a token; None checks, which synchronizes with the device.
    """

    key: Float[Tensor, "B H S D"]
    value: Float[Tensor, "B H S Dv"]
    position: Int[Tensor, "B S"]
    full: bool | None = None


@dataclass(frozen=True, slots=True)
class Attended:
    """The output of attention, and the observed sums per part of the tokens.

    Parts are in the order paged, then dense; a paged part has as many slots as its longest table
    row, or as its `longest`, in slot order. `mass` is summed as defined by `kv_policy.Observe`,
    `seen` is the number of contributing queries, and `also` holds the additional sums. All are
    empty without an observation, and 0 in empty slots. `others` has the same for each further
    `Observe` of the pass. `rescored` states that the scores of stored tokens have been updated in
    their pages; then only new tokens have sums.
    """

    out: Float[Tensor, "B H G L Dv"]
    mass: tuple[Float[Tensor, "B H _"], ...] = ()
    seen: tuple[Int[Tensor, "B H _"], ...] = ()
    also: tuple[dict[str, Float[Tensor, "B H _"]], ...] = ()
    others: tuple["Attended", ...] = ()
    rescored: bool = False

    @classmethod
    def of(cls, observed: Iterable["Attended"]) -> "Attended":
        """Return the first of several observations of a pass, with the rest as its `others`."""
        first, *rest = observed
        return replace(first, others=tuple(rest)) if rest else first
