"""The raw window in pages of the pool, so that the pool holds all of a sequence."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_paging import (
    BOTH,
    NONE,
    PagePool,
    Stored,
    TokenStore,
    VectorNames,
    adopt_all,
    expect_joined,
    join_all,
    read_slots,
    release_all,
    write_slots,
)
from kv_policy import CacheShape, PagedTokens, PageLayout, Raw, Running, TileCounts, tier_formats
from kv_runtime.window.base import ALL, Left, RingBuffer, Window, expect_alike

_KEYS: Final[VectorNames] = frozenset({"keys"})
_VALUES: Final[VectorNames] = frozenset({"values"})
_IN_PAGES: Final = "a raw window in pages cannot be saved; use a pool for one cache"


class PagedWindow(RingBuffer):
    """A `RawWindow` with slots in pages, as raw tokens.

    A sequence allocates ceil(size / tokens per page) pages per layer and head when it starts, and
    frees them when it ends; there are no allocations in between. Empty slots are zeros. Only
    positions, page tables and lengths are outside the pool.
    """

    def __init__(
        self,
        pool: PagePool,
        shape: CacheShape,
        sequences: int,
        size: int,
        scores: bool,
        *,
        vacant: bool = False,
    ) -> None:
        """Create empty ring buffers.

        Args:
            pool: the pool.
            shape: the shape of the vectors.
            sequences: B.
            size: W.
            scores: whether each token has a float32 score.
            vacant: whether sequences have no pages until others replace them by `adopt`.

        Raises:
            kv_paging.PoolExhausted: the pool has too few pages and cannot grow.
            ValueError: a page is smaller than one raw token.
        """
        self._tiles: dict[int, TileCounts] = {}  # of all table rows, by heads of a sequence
        self._shape = shape
        super().__init__(sequences, size, shape.kv_heads, pool.device)
        layout = PageLayout.fitted(tier_formats(Raw(), shape)[0], pool.page_bytes, scores)
        self._store = TokenStore(pool, layout, shape.layers, sequences, shape.kv_heads)
        if vacant:
            self._store.widen(-(-size // layout.tokens))
            return
        table_rows = self._store.table_rows()
        rows = len(table_rows), size
        nothing = torch.zeros(1, 1, 1, dtype=shape.dtype, device=pool.device)
        self._store.append(
            table_rows,
            nothing.expand(*rows, shape.key_dim),
            nothing.expand(*rows, shape.value_dim),
            torch.ones(rows, dtype=torch.bool, device=pool.device),
            torch.zeros(rows, device=pool.device) if scores else None,
        )

    @property
    def nbytes(self) -> int:
        """Bytes outside the pool."""
        return self.position.numel() * self.position.itemsize + self._store.table_bytes

    @property
    def dims(self) -> tuple[int, int]:
        """D and Dv."""
        return self._shape.key_dim, self._shape.value_dim

    @property
    def has_scores(self) -> bool:
        """Whether each token has a score."""
        return self._store.layout.scores

    @property
    def stores(self) -> tuple[TokenStore, ...]:
        """The store of the slots; every head has `size` of them."""
        return (self._store,)

    def view(self, layers: slice) -> PagedTokens:
        """Return layers for attention, with the heads of all layers concatenated.

        Valid until the next operation.
        """
        every = self._store.view_layers(layers)
        heads = every.length.shape[1]
        if heads not in self._tiles:
            length = self._filled[:, :1].expand(-1, heads).reshape(1, -1)
            self._tiles[heads] = TileCounts(length)
        tiles = self._tiles[heads]
        return replace(every, length=tiles.length.view_as(every.length), tiles=tiles)

    def views(self) -> list[PagedTokens]:
        """Return every layer as `view` does, without tiles."""
        return [replace(each, length=self._filled) for each in self._store.views()]

    @property
    def read_in_place(self) -> tuple[Tensor, ...]:
        """The tensors that `views` and positions are made of."""
        return (*self._store.read_in_place, self._filled, self.position)

    def forget_tiles(self) -> None:
        """Let the next attention count tiles again."""
        self._tiles = {}

    def keys_of(self, layers: slice) -> Float[Tensor, "n B H W D"]:
        """Return the keys of layers, by slot."""
        key = self._read(layers, _KEYS).key
        assert key is not None  # requested above
        return self._grid(layers, key, self.dims[0])

    def values_of(self, layers: slice) -> Float[Tensor, "n B H W Dv"]:
        """Return the values of layers, by slot."""
        value = self._read(layers, _VALUES).value
        assert value is not None  # requested above
        return self._grid(layers, value, self.dims[1])

    def scores_of(self, layers: slice) -> Float[Tensor, "n B H W"]:
        """Return the scores of layers, by slot.

        Raises:
            ValueError: tokens have no scores.
        """
        score = self._read(layers, NONE).score
        if score is None:
            raise ValueError("tokens of this window have no scores; create it with scores=True")
        return self._grid(layers, score[..., None], 1)[..., 0]

    def set_scores_of(self, layers: slice, score: Float[Tensor, "n B H W"]) -> None:
        """Set the scores of layers' tokens.

        Raises:
            ValueError: tokens have no scores.
        """
        self._store.set_layers_scores(layers, score.flatten(0, 2))

    def accumulate(
        self,
        layers: slice,
        before: Int[Tensor, " B"],
        mass: Float[Tensor, "n B H W"],
        seen: Int[Tensor, "n B H W"],
        running: Running,
    ) -> None:
        """Update the scores of layers' tokens with a decode step, as `Window.accumulate`.

        Raises:
            ValueError: tokens have no scores.
        """
        rows = self._by_table_row(layers, before[:, None])[:, 0]
        place = self._by_table_row(layers, self.position)
        observed = mass.flatten(0, 2), seen.flatten(0, 2)
        self._store.accumulate_layers(layers, rows, *observed, running, place)

    def put(
        self,
        layers: slice,
        key: Float[Tensor, "n B H L D"],
        value: Float[Tensor, "n B H L Dv"],
        position: Int[Tensor, "B L"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "n B H L"] | None = None,
    ) -> None:
        """Write the new tokens that stay in the window to their slots; only those are moved."""
        stays = self.stays(position, total)
        # At most `size` columns, with those that stay first.
        column = stays.long().argsort(dim=1, descending=True, stable=True)[:, : self.size]

        def each(x: Tensor) -> Tensor:
            """Convert [n, B, H, L, ...] to one row per head, over those columns."""
            at = column[None, :, None].expand(*x.shape[:3], -1)
            at = at[..., None].expand(*at.shape, x.shape[4]) if x.ndim == 5 else at
            return x.gather(3, at).flatten(0, 2)

        self._write(
            layers,
            position.gather(1, column).clamp(min=0) % self.size,
            stays.gather(1, column),
            each(key),
            each(value),
            None if score is None else each(score),
        )

    def exchange(
        self,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
        position: Int[Tensor, "B 1"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "N B H 1"] | None = None,
        layers: slice = ALL,
    ) -> Left:
        """Write one new token per sequence and return the replaced one, as `Window.exchange`."""
        real, slot = position >= 0, position.clamp(min=0) % self.size
        rows, slots = self._store.table_rows(layers), self._by_table_row(layers, slot)
        out = read_slots(self._store, rows, slots, BOTH)
        assert out.key is not None  # both were requested
        assert out.value is not None
        left = self.position.gather(1, slot).masked_fill(~real, -1)
        fresh, some = (key.flatten(0, 2), value.flatten(0, 2)), self._by_table_row(layers, real)
        after = score.flatten(0, 2) if self.has_scores and score is not None else None
        write_slots(self._store, rows, slots, some, *fresh, after)
        out_score = None if score is None or out.score is None else out.score.view(score.shape)
        return (
            out.key.view(key.shape).to(self._shape.dtype),
            out.value.view(value.shape).to(self._shape.dtype),
            left,
            out_score,
        )

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Reorder sequences to source[0], source[1], ...

        Raises:
            kv_paging.PoolExhausted: too few pages for the copies, after freeing dropped sequences.
            ValueError: a sequence does not exist, or `source` is empty.
        """
        self._store.select(source)
        self.reorder(source)

    def reorder(self, source: Int[Tensor, " B2"]) -> None:
        """Do the part of `select` outside `stores`."""
        self._hold(self.position[source])

    def join(self, other: Window) -> None:
        """Append another window's sequences with their pages, which empties it.

        Raises:
            ValueError: its type, size, shape or pool differs; nothing has changed.
        """
        self.expect_join(other)
        assert isinstance(other, PagedWindow)  # checked by expect_join
        join_all(self.stores, other.stores)
        self._hold(torch.cat((self.position, other.position)))
        other._hold(other.position[:0])

    def adopt(self, sequence: int, other: Window) -> None:
        """Replace an empty sequence by the only one of another window, with its pages.

        Raises:
            ValueError: its type, size, shape or pool differs; nothing has changed.
        """
        self.expect_join(other)
        assert isinstance(other, PagedWindow)  # checked by expect_join
        adopt_all(sequence, self.stores, other.stores)
        self._position[sequence] = other._position[0]
        self._renew()
        other._hold(other.position[:0])

    def expect_join(self, other: Window) -> None:
        """Raise if `join` would.

        Raises:
            ValueError: its type, size, shape or pool differs.
        """
        expect_alike(self, other)
        expect_joined(self.stores, other.stores)

    def release(self) -> None:
        """Remove all sequences and free their pages."""
        release_all(self.stores)
        self._hold(self.position[:0])

    def tensors(self) -> dict[str, Tensor]:
        """Raise: pages of a pool are not saved.

        Raises:
            ValueError: always.
        """
        raise ValueError(_IN_PAGES)

    def restore(self, tensors: Mapping[str, Tensor], seen: Int[Tensor, " B"]) -> None:
        """Fill the slots from `tensors` of another window of this shape."""
        self.hold_newest(seen)
        slot = torch.arange(self.size, device=seen.device).expand_as(self.position)
        each = [tensors.get(name) for name in ("key", "value", "score")]
        key, value, score = (None if x is None else x.flatten(0, 2) for x in each)
        assert key is not None, "checked with the state"
        assert value is not None, "values in keys are not in pages of a pool"
        self._write(slice(None), slot, self.position >= 0, key, value, score)

    def _read(self, layers: slice, vectors: VectorNames) -> Stored:
        store = self._store
        return store.kernels.read(store.whole(), store.table_rows(layers), self.size, vectors)

    def _count(self, layers: slice) -> int:
        return len(range(self._shape.layers)[layers])

    def _grid(
        self, layers: slice, rows: Float[Tensor, "S W D"], dim: int
    ) -> Float[Tensor, "n B H W D"]:
        lead = self._count(layers), len(self.position), self._shape.kv_heads
        return rows.view(*lead, self.size, dim)

    def _by_table_row(self, layers: slice, x: Tensor) -> Tensor:
        """Expand [B, L] to one row per head."""
        lead = self._count(layers), -1, self._shape.kv_heads, -1
        return x[None, :, None].expand(*lead).flatten(0, 2)

    def _write(
        self,
        layers: slice,
        slot: Int[Tensor, "B L"],
        some: Tensor,
        key: Float[Tensor, "S L D"],
        value: Float[Tensor, "S L Dv"],
        score: Float[Tensor, "S L"] | None,
    ) -> None:
        write_slots(
            self._store,
            self._store.table_rows(layers),
            self._by_table_row(layers, slot),
            self._by_table_row(layers, some),
            key,
            value,
            score if self.has_scores else None,
        )
