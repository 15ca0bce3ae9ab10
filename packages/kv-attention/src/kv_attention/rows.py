"""A decode step on an engine's own tensors, whose rows are tokens: one call for a whole layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_attention.tokens import Attended
from kv_policy import Observe, PagedTokens, PageLayout, Running


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where the new tokens of a step are stored.

    Attributes:
        data: the pages.
        layout: their layout, without scores and positions.
        page: page of each token and head, by token; of the first n tokens of a step.
        slot: slot of each in its page.
    """

    data: UInt8[Tensor, "P nbytes"]
    layout: PageLayout
    page: Int[Tensor, " nH"]
    slot: Int[Tensor, " nH"]


@dataclass(frozen=True, slots=True)
class RowInputs:
    """A decode step of one layer: one new token of each sequence, in consecutive rows.

    A new token sees the stored tokens of its sequence, and itself as it is given.

    Attributes:
        query: queries of all tokens of the step, by token and query head.
        key: their keys.
        value: their values.
        output: set to the attention of the sequences' rows; other rows are unchanged.
        first: the row of the first sequence.
        position: positions of the new tokens; -1 for padding, whose output is 0.
        pages: stored tokens, one entry per tier.
        scale: the factor of the logits.
        softcap: the bound of the logits, as for `kv_attention.attend`.
        sinks: a logit of each query head, as for `kv_attention.attend`.
        places: where new tokens are stored before the attention, as rows of one request see each
            other's; None: the caller stores them.
        copies: set to the keys and values of the sequences' rows; None: no copies are needed.
        observations: the attention masses to sum, without positions and noise; the first belongs
            to the result, the others become its `others`.
        running: updates the scores of stored tokens in their pages with the only observation; the
            result then has the masses of new tokens alone, and is `rescored`. None: no update.
        page_positions: positions of each part of `pages`, -1 for empty slots, if pages store none;
            only read to update scores.
    """

    query: Float[Tensor, "m Q D"]
    key: Float[Tensor, "m H D"]
    value: Float[Tensor, "m H Dv"]
    output: Float[Tensor, "m Q Dv"]
    first: int
    position: Int[Tensor, "B 1"]
    pages: Sequence[PagedTokens]
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "H G"] | None = None
    places: TokenPlaces | None = None
    copies: tuple[Float[Tensor, "B H 1 D"], Float[Tensor, "B H 1 Dv"]] | None = None
    observations: tuple[Observe, ...] = (Observe(0),)
    running: Running | None = None
    page_positions: Sequence[Int[Tensor, "B H _"] | None] = ()


@runtime_checkable
class DecodeRows(Protocol):
    """A backend's decode step on an engine's tensors."""

    def __call__(self, inputs: RowInputs) -> Attended | None:
        """Attend, write the output, store and copy the new tokens; None: nothing has been done.

        Returns the sequences' rows of the output, and what is observed, as `kv_attention.attend`.

        Raises:
            RuntimeError: the inputs do not match, or a table names a missing page; nothing has been
                written.
        """
        ...
