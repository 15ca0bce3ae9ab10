"""Caches that show what a model's layers attend with, and hold none of it."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from kv_transformers.fresh_layer import AttendingCache, FreshLayer
from kv_transformers.support import cache_shape
from kv_transformers.switch import install


class EmptyCache(AttendingCache):
    """A cache in whose place a model attends to the fresh tokens alone, causally.

    Use it as the cache of forward passes of whole texts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Belong to a model.

        Raises:
            UnsupportedModelError: the model's attention is of a kind that no cache of ours serves.
        """
        layers = cache_shape(model).layers
        install(model)
        super().__init__(model, [FreshLayer(self, i) for i in range(layers)])

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        scale: float,
        valid: Bool[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L Hq Dv"]:
        """Attend causally over the fresh tokens."""
        there = None if valid is None else valid.expand(len(query), -1)
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if there is None else _mask(there),
            is_causal=there is None,
            scale=scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).contiguous()

    def expect_next(self, position: Int[Tensor, "_ L"], valid: Bool[Tensor, "B L"] | None) -> None:
        """Take any positions: nothing is held that these could follow."""


# Of a layer: its number, queries, keys and values as they reach the cache, and attention's output.
Show: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


class WatchingCache(EmptyCache):
    """Calls a function after each layer's attention, for probing what a model's code does."""

    def __init__(self, model: PreTrainedModel, show: Show) -> None:
        """Belong to a model, and call `show`.

        Raises:
            UnsupportedModelError: as `EmptyCache`.
        """
        super().__init__(model)
        self._show = show

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        scale: float,
        valid: Bool[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L Hq Dv"]:
        """Attend, then call the function."""
        out = super().attend(layer, query, key, value, scale, valid)
        self._show(layer, query, key, value, out)
        return out


def _mask(there: Bool[Tensor, "B L"]) -> Bool[Tensor, "B 1 L L"]:
    """Each token looks at those before it; padding looks at itself, so that it stays finite."""
    length = there.shape[1]
    itself = torch.eye(length, dtype=torch.bool, device=there.device)
    earlier = torch.ones_like(itself).tril()
    return (earlier & there[:, None] | itself)[:, None]
