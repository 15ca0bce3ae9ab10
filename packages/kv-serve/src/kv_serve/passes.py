"""A forward pass, and the two shapes in which what belongs to a layer's streams comes."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Pass:
    """One forward pass: where its columns stand in their sequences."""

    position: Int[Tensor, "B L"]  # -1: padding
    total: Int[Tensor, " B"]  # tokens seen once the pass ends
    prompt: bool = True  # or a part of one; otherwise each sequence brings a token it generated
    more: bool = False  # the prompt goes on in a later pass


def flat(x: Tensor) -> Tensor:
    """[B, H, ...] as one row per stream of a layer."""
    return x.flatten(0, 1)


def grid(x: Tensor, heads: int) -> Tensor:
    """One row per stream of a layer as [B, H, ...]."""
    return x.reshape(x.shape[0] // heads, heads, *x.shape[1:])
