"""A forward pass, and the two shapes in which what belongs to a layer's streams comes."""

from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Pass:
    """One forward pass: where its columns stand in their sequences."""

    position: Int[Tensor, "B L"]  # -1: padding
    total: Int[Tensor, " B"]  # tokens seen once the pass ends
    prompt: bool = True  # or a part of one; otherwise each sequence brings a token it generated
    more: bool = False  # the prompt goes on in a later pass

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
