"""Arguments of page kernels: the tokens of a write, and the moves of a decode step."""

from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_policy import PagedTokens


@dataclass(frozen=True, slots=True)
class TokenWrite:
    """Tokens to encode, and the slots of the table rows for them.

    Attributes:
        table_rows: the ids of the table rows, each named once.
        start: the first slot to write in each.
        keep: the tokens to write, in order; a row's other tokens are skipped.
        key: keys.
        value: values.
        score: scores, if the layout stores them.
        position: positions, if the layout stores them.
    """

    table_rows: Int[Tensor, " S"]
    start: Int[Tensor, " S"]
    keep: Bool[Tensor, "S L"]
    key: Float[Tensor, "S L D"]
    value: Float[Tensor, "S L Dv"]
    score: Float[Tensor, "S L"] | None = None
    position: Int[Tensor, "S L"] | None = None


@dataclass(frozen=True, slots=True)
class Recoding:
    """Stored tokens to encode in another format, and the slots of the table rows for them.

    Attributes:
        source: the tokens, in pages that are not written to, with vectors of as many dimensions.
        source_rows: a row of the source for each of the table rows.
        table_rows: the ids of the table rows, each named once.
        start: the first slot to write in each.
        keep: the slots of the source whose tokens are written, in order; all of them hold one.
    """

    source: PagedTokens
    source_rows: Int[Tensor, " S"]
    table_rows: Int[Tensor, " S"]
    start: Int[Tensor, " S"]
    keep: Bool[Tensor, "S L"]


# Table rows outside of a pool, one part for each kind of heads; None: no row of the kind.
CopiedRows: TypeAlias = tuple[PagedTokens | None, ...]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One token per table row."""

    key: Float[Tensor, "S D"]
    value: Float[Tensor, "S Dv"]
    score: Float[Tensor, " S"] | None
    position: Int[Tensor, " S"] | None


@dataclass(frozen=True, slots=True)
class Placement:
    """A step's decisions: the candidate's tier, the tier of the victim, and its new tier."""

    candidate: UInt8[Tensor, " S"]
    victim: UInt8[Tensor, " S"]
    target: UInt8[Tensor, " S"]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step of the rows of one kind: K tiers over one pool, and the moves of their tokens.

    `tiers` contain all table rows, see `PageKernels`. `place` is the victim's slot in each tier, -1
    without a victim.
    """

    tiers: tuple[PagedTokens, ...]
    choice: Placement
    place: Int[Tensor, "K S"]
    candidate: NewTokens
