"""Requests that attend together in a step, as one rectangle of tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_serve.tiered import TieredCache


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of a cache's sequences: one prompt's, or one each of those that generate.

    Rows count the tokens of the step.
    """

    cache: TieredCache
    real: Bool[Tensor, "B L"]  # which places hold a token
    source: Int[Tensor, "B L"]  # the row of each; any, where there is none
    place: Int[Tensor, " n"]  # of those there are, counted through sequences
    target: Int[Tensor, " n"]  # their rows

    @classmethod
    def of(cls, cache: TieredCache, row: Int[Tensor, "B L"], device: torch.device) -> "Part":
        """Give the part of a cache's sequences; row -1 says that a sequence brings no token.

        What all layers look up is moved to the device once.
        """
        real = row >= 0
        place = real.flatten().nonzero()[:, 0]
        found = (real, row.clamp(min=0), place, row.flatten()[place])
        return cls(cache, *(x.to(device) for x in found))

    def begin(self, *, prompt: bool, more: bool) -> None:
        """Begin the pass of the step."""
        self.cache.begin(self.real, prompt=prompt, more=more)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        scale: float,
        output: Float[Tensor, "m Q Dv"],
    ) -> None:
        """Attend, store, and write what the tokens see to their rows of `output`."""
        heads = key.shape[1]
        grouped = query[self.source].unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
        fresh = (key[self.source].transpose(1, 2), value[self.source].transpose(1, 2))
        out = self.cache.attend(layer, grouped, *fresh, scale)
        by_place = out.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        output.index_copy_(0, self.target, by_place[self.place].to(output.dtype))
