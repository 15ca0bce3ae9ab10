"""What page kernels do, as data: the tokens of a write, and the moves of a decode step."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_policy import PagedTokens


@dataclass(frozen=True, slots=True)
class TokenWrite:
    """Tokens to encode, and the slots of the table rows that they are written to.

    Attributes:
        table_rows: the ids of the table rows, each named once.
        start: the first slot to write to in each.
        keep: which tokens to write, in order; a row's other tokens are left out.
        key: keys.
        value: values.
        score: scores, where the layout stores them.
        position: positions, where the layout stores them.
    """

    table_rows: Int[Tensor, " S"]
    start: Int[Tensor, " S"]
    keep: Bool[Tensor, "S L"]
    key: Float[Tensor, "S L D"]
    value: Float[Tensor, "S L Dv"]
    score: Float[Tensor, "S L"] | None = None
    position: Int[Tensor, "S L"] | None = None


@dataclass(frozen=True, slots=True)
class NewTokens:
    """A token of each table row."""

    key: Float[Tensor, "S D"]
    value: Float[Tensor, "S Dv"]
    score: Float[Tensor, " S"] | None
    position: Int[Tensor, " S"] | None


@dataclass(frozen=True, slots=True)
class Placement:
    """What a step does: where the candidate goes, which tier's victim moves, and where to."""

    candidate: UInt8[Tensor, " S"]
    victim: UInt8[Tensor, " S"]
    target: UInt8[Tensor, " S"]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step of the rows of one kind: K tiers over one pool, and what happens to their tokens.

    `tiers` are of all table rows, see `PageKernels`. `place` is the victim's slot in each tier, -1
    where it has none.
    """

    tiers: tuple[PagedTokens, ...]
    choice: Placement
    place: Int[Tensor, "K S"]
    candidate: NewTokens
