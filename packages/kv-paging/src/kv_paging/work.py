"""A decoding step as data: what enters each table row, and what leaves or moves."""

from dataclasses import dataclass

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_policy import PagedTokens


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
