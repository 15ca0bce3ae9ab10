"""What goes into attention besides pages, and what comes out."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseTokens:
    """Tokens in plain tensors: the raw window, the fresh chunk of a forward pass.

    A token is visible to the queries that do not come before it. A place with position -1 holds no
    token, and whatever lies there has no effect.

    `full` says whether every place holds a token; None looks, for which the host waits.
    """

    key: Float[Tensor, "B H S D"]
    value: Float[Tensor, "B H S Dv"]
    position: Int[Tensor, "B S"]
    full: bool | None = None


@dataclass(frozen=True, slots=True)
class Attended:
    """The output of attention, and per part of the tokens what was observed of it.

    Parts are in the order paged, then dense; a paged part has as many places as its longest
    row, or as its `longest` says, in the order of its slots. `mass` is summed as the contract's
    `Observe` says, `seen` is the number of queries that counted into it, and `also` holds the sums
    that were asked for besides. All are empty if nothing was to be observed, and 0 at places
    without a token. `others` has the same for each further `Observe` of the pass.
    """

    out: Float[Tensor, "B H G L Dv"]
    mass: tuple[Float[Tensor, "B H _"], ...] = ()
    seen: tuple[Int[Tensor, "B H _"], ...] = ()
    also: tuple[dict[str, Float[Tensor, "B H _"]], ...] = ()
    others: tuple["Attended", ...] = ()

    @classmethod
    def of(cls, observed: Iterable["Attended"]) -> "Attended":
        """Return the first of several observations of a pass, with the rest as its `others`."""
        first, *rest = observed
        return replace(first, others=tuple(rest)) if rest else first
