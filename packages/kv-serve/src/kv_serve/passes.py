"""A forward pass, and the two shapes in which what belongs to a layer's streams comes."""

from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Pass:
    """One forward pass: where its columns stand in their sequences."""

    position: Int[Tensor, "B L"]  # -1: padding
    total: Int[Tensor, " B"]  # tokens seen once the pass ends
    prompt: bool = True  # or a part of one; otherwise each sequence brings a token it generated
    more: bool = False  # the prompt goes on in a later pass

    @cached_property
    def before(self) -> Int[Tensor, " B"]:
        """Tokens that each sequence had before a pass that generates; -1: it brings none."""
        brings = (self.position >= 0).any(1)
        return (self.total - self.position.shape[1]).where(brings, -1)

    def over(self, layers: int) -> "Pass":
        """Let the sequences of so many layers be rows, one layer's after another's."""
        position, total = self.position.repeat(layers, 1), self.total.repeat(layers)
        return replace(self, position=position, total=total)


def flat(x: Tensor) -> Tensor:
    """[B, H, ...] as one row per stream."""
    return x.flatten(0, 1)


def grid(x: Tensor, heads: int) -> Tensor:
    """One row per stream as [B, H, ...]; rows of several layers are those of more sequences."""
    return x.reshape(x.shape[0] // heads, heads, *x.shape[1:])
