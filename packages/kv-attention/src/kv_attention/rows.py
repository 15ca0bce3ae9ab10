"""A decode step on an engine's own tensors, whose rows are tokens: one call for a whole layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_attention.tokens import Attended
from kv_policy import Observe, PagedTokens, PageLayout, Running


@dataclass(slots=True)  # not frozen, which would take longer to create in every layer of a step
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


@dataclass(frozen=True, slots=True, eq=False)
class RowMaps:
    """Matrices that vectors of a step are multiplied with from the right, before it and after it.

    Stored tokens are coordinates: new keys and values are mapped before they are attended to,
    stored and copied, queries are mapped likewise, and outputs are mapped back. A matrix is for all
    heads, or one for each KV head and its queries, in any of the dtypes of vectors. Products are
    rounded to the dtype of the vectors. None: the vectors are coordinates already.

    Attributes:
        key: of keys.
        query: of queries; their products with mapped keys are the logits.
        value: of values.
        output: of the attention over mapped values.
        shift: subtracted from keys before they are mapped, in their dtype; None: nothing is.
        tensors: those that there are, in the order above.
        kinds: the place of each in that order.
        width: most dimensions of a vector before or after a matrix.
        consecutive: whether the numbers of each tensor's rows are, or of each matrix's columns.
    """

    key: Float[Tensor, "*H D R"] | None = None
    query: Float[Tensor, "*Hq D R"] | None = None
    value: Float[Tensor, "*Hv Dv Rv"] | None = None
    output: Float[Tensor, "*Ho Rv Dv"] | None = None
    shift: Float[Tensor, "Hs D"] | None = None
    # Found once, as each step of a layer reads them.
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)
    kinds: tuple[int, ...] = field(init=False, repr=False)
    width: int = field(init=False, repr=False)
    consecutive: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check what the shift is subtracted from, and describe the tensors.

        Raises:
            ValueError: there is a shift, and no matrix of keys.
        """
        if self.shift is not None and self.key is None:
            raise ValueError("keys have a shift and no matrix; give both, or no shift")
        every = self.key, self.query, self.value, self.output, self.shift
        found = {kind: x for kind, x in enumerate(every) if x is not None}
        matrices = [x for x in every[:4] if x is not None]
        by_lines = all(1 in x.stride()[-2:] for x in matrices)
        object.__setattr__(self, "tensors", tuple(found.values()))
        object.__setattr__(self, "kinds", tuple(found))
        object.__setattr__(self, "width", max((max(x.shape[-2:]) for x in matrices), default=0))
        shifts = self.shift is None or self.shift.stride(1) == 1
        object.__setattr__(self, "consecutive", by_lines and shifts)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Heads of a layer that store vectors of the same dimensions, with their stored tokens.

    Attributes:
        heads: the heads.
        dims: dimensions of a stored key and of a stored value, at most those of the longest.
        pages: their tokens, one entry per tier that holds some.
    """

    heads: tuple[int, ...]
    dims: tuple[int, int]
    pages: tuple[PagedTokens, ...]


@dataclass(slots=True)
class RowMemo:
    """What a backend finds out about one step of a layer, for others.

    Inputs that share one as `memo` differ in their tensors, scale, softcap, sinks and maps alone,
    and tensors have the same shapes and dtypes; whether gradients are recorded is the same, too.
    Inputs that share one as `kept` have the same tensors of stored tokens.
    """

    found: object | None = None


@dataclass(slots=True)  # not frozen, which would take longer to create in every layer of a step
class RowInputs:
    """A decode step of one layer: one new token of each sequence, in consecutive rows.

    A new token sees the stored tokens of its sequence, and itself as it is given. Vectors of R and
    Rv dimensions are stored; without `maps` these are D and Dv.

    Attributes:
        query: queries of all tokens of the step, by token and query head.
        key: their keys.
        value: their values.
        output: set to the attention of the sequences' rows; other rows are unchanged.
        first: the row of the first sequence.
        position: positions of the new tokens; -1 for padding, whose output is 0.
        pages: stored tokens, one entry per tier; empty if there are `groups`.
        scale: the factor of the logits.
        softcap: the bound of the logits, as for `kv_attention.attend`.
        sinks: a logit of each query head, as for `kv_attention.attend`.
        places: where new tokens are stored before the attention, as rows of one request see each
            other's; None: the caller stores them.
        copies: set to the keys and values of the sequences' rows, as they are stored; None: no
            copies are needed.
        observations: the attention masses to sum, without positions and noise; the first belongs
            to the result, the others become its `others`.
        running: updates the scores of stored tokens in their pages with the only observation; the
            result then has the masses of new tokens alone, and is `rescored`. None: no update.
        page_positions: positions of each part of `pages`, -1 for empty slots, if pages store none;
            only read to update scores.
        maps: what maps vectors to those that are stored, and outputs back; None: nothing does.
        groups: all heads, each in one group, if they store vectors of different dimensions. Then R
            and Rv are those of the longest; what is past those of a head is neither read, nor
            attended to, and 0 in its attention. Empty: all heads are alike.
        memo: shared by the layers of a step; None: every layer is checked on its own.
        kept: shared by the steps of a layer; None: its tensors are read anew.
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
    copies: tuple[Float[Tensor, "B H R"], Float[Tensor, "B H Rv"]] | None = None
    observations: tuple[Observe, ...] = (Observe(0),)
    running: Running | None = None
    page_positions: Sequence[Int[Tensor, "B H _"] | None] = ()
    maps: RowMaps | None = None
    groups: Sequence[RowGroup] = ()
    memo: RowMemo | None = None
    kept: RowMemo | None = None


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
