"""Requests that attend together in a step, as one rectangle of tokens."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kv_serve.tiered import TieredCache


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of a cache's sequences: one prompt's, or one each of those that generate."""

    cache: TieredCache
    row: Int[Tensor, "B L"]  # of each token among those of the step; -1: the sequence brings none

    def begin(self, *, prompt: bool, more: bool) -> None:
        """Begin the pass of the step."""
        self.cache.begin(self.row >= 0, prompt=prompt, more=more)

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
        row = self.row.clamp(min=0).to(query.device)
        heads = key.shape[1]
        grouped = query[row].unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
        fresh = (key[row].transpose(1, 2), value[row].transpose(1, 2))
        out = self.cache.attend(layer, grouped, *fresh, scale)
        real = self.row >= 0
        output[row[real]] = out.permute(0, 3, 1, 2, 4).flatten(2, 3)[real].to(output.dtype)
