"""Caches that observe the attention inputs of a model's layers and store nothing."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from kv_attention import DenseTokens, attend
from kv_transformers.fresh_layer import AttendingCache
from kv_transformers.pass_columns import PassColumns
from kv_transformers.softmax import Softmax
from kv_transformers.support import cache_shape
from kv_transformers.switch import install


class EmptyCache(AttendingCache):
    """A cache that stores nothing: a pass attends causally to its own tokens only.

    Use it as the cache of forward passes of whole texts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Bind the cache to a model.

        Raises:
            UnsupportedModelError: the model's attention is not supported.
        """
        cache_shape(model)
        install(model)
        super().__init__(model)

    def start(self, drafts: int = 0) -> None:
        """Clear the states of layers that transformers caches, as a pass is a whole text."""
        self.layers = self._empty_layers()

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq Lq D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        softmax: Softmax,
        columns: PassColumns,
    ) -> Float[Tensor, "B Lq Hq Dv"]:
        """Attend over the new tokens."""
        there = None if columns.valid is None else columns.valid.expand(len(query), -1)
        own = (columns.reach, columns.chosen) != (None, None) or query.shape[2] != key.shape[2]
        if own or not softmax.is_plain:
            return _attended(query, key, value, softmax, there, columns)
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if there is None else _mask(there),
            is_causal=there is None,
            scale=softmax.scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).contiguous()

    def expect_next(self, position: Int[Tensor, "_ L"], valid: Bool[Tensor, "B L"] | None) -> None:
        """Accept any positions, as no tokens are stored."""


# Arguments: layer index, queries, keys and values as passed to the cache, attention output.
Show: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


class WatchingCache(EmptyCache):
    """Calls a function after each layer's attention, for probing a model's code."""

    def __init__(self, model: PreTrainedModel, show: Show) -> None:
        """Bind the cache to a model, and call `show` after each layer.

        Raises:
            UnsupportedModelError: as `EmptyCache`.
        """
        super().__init__(model)
        self._show = show

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq Lq D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        softmax: Softmax,
        columns: PassColumns,
    ) -> Float[Tensor, "B Lq Hq Dv"]:
        """Attend, then call the function."""
        out = super().attend(layer, query, key, value, softmax, columns)
        self._show(layer, query, key, value, out)
        return out


def _mask(there: Bool[Tensor, "B L"]) -> Bool[Tensor, "B 1 L L"]:
    """Return a causal mask; padding attends to itself, so that its output is finite."""
    length = there.shape[1]
    itself = torch.eye(length, dtype=torch.bool, device=there.device)
    earlier = torch.ones_like(itself).tril()
    return (earlier & there[:, None] | itself)[:, None]


def _attended(
    query: Float[Tensor, "B Hq Lq D"],
    key: Float[Tensor, "B H L D"],
    value: Float[Tensor, "B H L Dv"],
    softmax: Softmax,
    there: Bool[Tensor, "B L"] | None,
    columns: PassColumns,
) -> Float[Tensor, "B Lq Hq Dv"]:
    """Attend where a causal mask is not enough, or with the last queries; padding returns 0."""
    batch, heads, length, _ = key.shape
    held = (
        torch.ones(batch, length, dtype=torch.bool, device=key.device) if there is None else there
    )
    position = torch.where(held, held.long().cumsum(-1) - 1, -1)
    tokens = DenseTokens(key, value, position, full=there is None)
    reach, chosen = columns.reach, columns.chosen
    sees = position if reach is None else position.gather(1, reach).where(held, -1)
    if chosen is not None and there is not None:  # by position instead of column
        order = (~there).long().argsort(dim=1, stable=True)
        chosen = chosen.gather(2, order[:, None].expand(-1, chosen.shape[1], -1))
    out = attend(
        query.unflatten(1, (heads, -1)),
        sees[:, -query.shape[2] :],
        (),
        (tokens,),
        softmax.scale,
        softcap=softmax.softcap,
        sinks=softmax.sinks_by_head(heads),
        chosen=chosen,
    ).out
    return out.flatten(1, 2).transpose(1, 2).contiguous()
