"""The tokens of a layer's heads by kind, for heads with different vector lengths."""

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Int
from torch import Tensor

from kv_attention import DenseTokens, HeadGroup, RowGroup
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


def row_groups(
    kinds: RankGroups,
    shapes: Sequence[CacheShape],
    stores: Sequence[TokenStore | PerHeadRankStore],
    raw: Window | None,
) -> list[tuple[RowGroup, ...]] | None:
    """Return the stored tokens of each layer by head, for a decode step on an engine's rows.

    Args:
        kinds: the kind of each head.
        shapes: the shape of each kind.
        stores: stores that may hold tokens.
        raw: the window, if it holds tokens.

    Returns:
        None: the values of a window are in its keys.
    """
    held: list[list[list[PagedTokens]]] = [[] for _ in shapes]  # by kind, store and cell
    for store in stores:
        assert isinstance(store, PerHeadRankStore), "heads are of several kinds"
        for found, member in zip(held, store.members, strict=True):
            if member.longest:
                found.append(member.views())
    if isinstance(raw, RaggedWindow):
        for found, ring in zip(held, raw.members, strict=True):
            slots = ring.views()
            if slots is None:
                return None
            found.append(slots)
    dims = [(shape.key_dim, shape.value_dim) for shape in shapes]
    cells = [list(zip(*found, strict=True)) for found in held]

    def group(kind: int, cell: int, head: int) -> RowGroup:
        return RowGroup((head,), dims[kind], cells[kind][cell] if cells[kind] else ())

    return [tuple(group(*each) for each in layer) for layer in kinds.by_layer]
