"""The tokens of a layer's heads by kind, for heads with different vector lengths."""

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Int
from torch import Tensor

from kv_attention import DenseTokens, HeadGroup
from kv_paging import PerHeadRankStore, RankGroups, TokenStore
from kv_policy import CacheShape, PagedTokens
from kv_runtime.window.base import Window
from kv_runtime.window.ragged import RaggedWindow


def head_groups(
    kinds: RankGroups,
    shapes: Sequence[CacheShape],
    stores: Sequence[TokenStore | PerHeadRankStore],
    raw: Window | None,
    layer: int,
    fresh: DenseTokens,
    places: Sequence[Int[Tensor, "B H _"] | None] | None,
) -> list[HeadGroup]:
    """Return a layer's tokens in stores and window, with the new tokens, by kind of head.

    Args:
        kinds: the kind of each head.
        shapes: the shape of each kind.
        stores: stores that may hold tokens.
        raw: the window, if it holds tokens.
        layer: the layer.
        fresh: the tokens of the pass, padded to the longest vectors.
        places: positions of paged tokens, one entry per store and window, if needed.
    """
    found = []
    for kind, shape in enumerate(shapes):
        heads = kinds.heads(kind, layer)
        if not len(heads):
            continue
        key = fresh.key[:, heads, :, : shape.key_dim]
        new = replace(fresh, key=key, value=fresh.value[:, heads, :, : shape.value_dim])
        parts: list[PagedTokens | DenseTokens | None] = [
            s.view_kind(kind, layer) for s in stores if isinstance(s, PerHeadRankStore)
        ]
        if isinstance(raw, RaggedWindow):
            parts.append(raw.view_kind(kind, layer))
        found.append(
            HeadGroup(
                heads,
                tuple(x for x in parts if x is None or isinstance(x, PagedTokens)),
                (*(x for x in parts if isinstance(x, DenseTokens)), new),
                None
                if places is None
                else tuple(None if at is None else at[:, heads] for at in places),
            )
        )
    return found
