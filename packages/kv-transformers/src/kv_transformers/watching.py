"""A cache that shows what a model's layers attend with, for probing what the model's code does."""

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from kv_serve.hf.cache import CompressedCache

# Of a layer: its number, queries, keys and values as they reach the cache, and attention's output.
Show: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


class WatchingCache(CompressedCache):
    """An uncompressed cache of a model that calls a function after each layer's attention."""

    def __init__(self, model: PreTrainedModel, show: Show) -> None:
        """Make an empty cache.

        Raises:
            UnsupportedModelError: as `CompressedCache`.
        """
        super().__init__(model, "raw")
        self._show = show

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        scale: float,
        valid: Bool[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L *out"]:
        """Attend as `CompressedCache`, then call the function."""
        out = super().attend(layer, query, key, value, scale, valid)
        self._show(layer, query, key, value, out)
        return out
