"""The storage of one batch: pool, tiers, raw window and token counts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import DenseTokens, HeadGroup, PageBounds, RowGroup
from kv_paging import PagePool, PerHeadRankStore, PerHeadRankTiers, Tiers, TokenStore
from kv_policy import CacheShape, KVPolicy, PagedTokens
from kv_runtime.columns import Columns
from kv_runtime.copies import to_device
from kv_runtime.forward_pass import Pass, flat, grid
from kv_runtime.heads import head_groups, row_groups
from kv_runtime.layout import Layout
from kv_runtime.memory import MemoryReport
from kv_runtime.window.base import RingBuffer, Window

__all__ = ["Batch", "LayerRows", "Pass", "flat", "grid"]

LayerRows: TypeAlias = tuple[Sequence[PagedTokens], Sequence[RowGroup]]  # one of them is empty

_ALL = slice(None)


@dataclass
class Batch:
    """Pages of every tier and the raw window, for all layers of a batch of sequences."""

    layout: Layout
    pool: PagePool
    tiers: Tiers | PerHeadRankTiers
    window: Window | None
    seen: Int[Tensor, " B"]  # tokens seen per sequence
    columns: int = field(default=0)  # columns of the batch, including padding
    started: bool = field(default=False)  # every sequence has at least one token
    shares: bool = field(default=False)  # the pool is shared with other batches
    record: Columns | None = field(default=None)  # which columns hold tokens; None: not recorded
    vacant: set[int] = field(default_factory=set)  # sequences of no request, which have no tokens
    prefix_pages: Int[Tensor, " B"] = field(init=False)  # pages that a stored prefix holds, too

    def __post_init__(self) -> None:
        """Start without pages of prefixes."""
        self.prefix_pages = torch.zeros_like(self.seen)

    @classmethod
    def allocate(
        cls,
        policy: KVPolicy,
        layout: Layout,
        sequences: int,
        pages: int | None,
        device: torch.device,
        kernels: str | None = None,
        pool: PagePool | None = None,
        window_in_pages: bool = False,
        *,
        vacant: bool = False,
    ) -> "Batch":
        """Allocate the storage of a batch.

        Args:
            policy: the policy.
            layout: the layout of its pages.
            sequences: B.
            pages: size of a private pool; None: it grows as tokens arrive.
            device: the device of the batch.
            kernels: page kernels of a private pool.
            pool: a pool shared with other batches, instead of a private one.
            window_in_pages: whether the raw window is in the pool, too.
            vacant: whether the sequences are of no request until others replace them by `adopt`.

        Raises:
            kv_paging.PoolExhausted: a fixed pool is too small for the raw window.
            ValueError: both pages and a pool are given, or the pool's page size differs.
        """
        if pool is not None and pages is not None:
            raise ValueError(f"both a pool and {pages} pages were given; give at most one of them")
        shares = pool is not None
        pool = pool or PagePool(
            layout.page_bytes, pages or 0, grows=pages is None, device=device, kernels=kernels
        )
        tiers = layout.tiers(pool, sequences)
        if policy.reading is not None:
            tiers.parts[0].keep_bounds(policy.reading.coded)
        scores = policy.selector is not None
        return cls(
            layout=layout,
            pool=pool,
            tiers=tiers,
            window=layout.raw_window(
                tiers, sequences, device, scores, window_in_pages, vacant=vacant
            ),
            seen=torch.zeros(sequences, dtype=torch.long, device=device),
            shares=shares,
            record=None if shares else Columns(sequences, device),
            vacant=set(range(sequences)) if vacant else set(),
        )

    @property
    def shape(self) -> CacheShape:
        """The stored shape: heads, and the dimensions of the longest vectors."""
        return self.layout.shape

    @property
    def window_size(self) -> int:
        """Tokens in the raw window."""
        return self.layout.window

    @property
    def page_tokens(self) -> Int[Tensor, "K N H"]:
        """Tokens per page of each tier, layer and head."""
        return self.layout.page_tokens.to(self.seen.device)

    @property
    def stores(self) -> tuple[TokenStore | PerHeadRankStore, ...]:
        """The stores, in the order of attention; a tier may have two."""
        return self.tiers.stores

    @property
    def held_stores(self) -> list[tuple[int, TokenStore | PerHeadRankStore]]:
        """Tiers and stores that may hold tokens of a layer during its attention.

        In the first pass they hold at most tokens of earlier layers.
        """
        pairs = zip(self.tiers.tier, self.stores, strict=True)
        return [(tier, store) for tier, store in pairs if self.columns and store.longest]

    def views(self, layer: int) -> tuple[list[PagedTokens], list[DenseTokens]]:
        """Return a layer's paged and dense tokens, if all heads have the same dimensions.

        Valid until the next operation.
        """
        stores = [store for _, store in self.held_stores]
        pages = [store.view(layer) for store in stores if isinstance(store, TokenStore)]
        raw = self.held_window
        if not isinstance(raw, RingBuffer):
            return pages, []
        window = raw.view(slice(layer, layer + 1))
        return ([*pages, window], []) if isinstance(window, PagedTokens) else (pages, [window])

    def update_bounds(self, now: Pass) -> None:
        """Compute the bounds of all full pages for a decode pass, if the policy reads by them."""
        if not now.is_prefill:
            self.tiers.parts[0].update_bounds()

    def page_bounds(self, layer: int) -> PageBounds | None:
        """Return the bounds of a layer's pages, the first of `views`; None: it has none."""
        first = self.tiers.parts[0]
        if first.bounds is None or not self.columns or not first.longest:
            return None
        lead, each = first.length.shape, first.bounds.both
        if not first.bounds.in_pages:
            each = each.view(*lead, *each.shape[1:])[layer]
        # `update_bounds` has bounded every full page, and a pass stores its tokens at its end.
        return PageBounds(each, first.bounds.count.view(lead)[layer], missing=0)

    def layer_rows(self) -> list[LayerRows] | None:
        """Return the stored tokens of every layer, in the order of `views` and without tiles.

        Valid until the next operation.

        Returns:
            None: the values of a window are in its keys.
        """
        stores, raw = [store for _, store in self.held_stores], self.held_window
        if isinstance(self.tiers, PerHeadRankTiers):
            groups = row_groups(self.tiers.kinds, self.layout.shapes, stores, raw)
            return None if groups is None else [((), layer) for layer in groups]
        found = [store.views() for store in stores if isinstance(store, TokenStore)]
        if raw is not None:
            slots = raw.views() if isinstance(raw, RingBuffer) else None
            if slots is None:
                return None
            found.append(slots)
        pages = zip(*found, strict=True) if found else [()] * self.shape.layers
        return [(layer, ()) for layer in pages]

    @property
    def read_in_place(self) -> tuple[Tensor, ...] | None:
        """The tensors that `layer_rows` and positions are made of; None: others may be, each time.

        Only a pool that does not grow has them: what refers to the memory of one that does would
        keep it after it has been replaced.
        """
        if self.pool.grows or isinstance(self.tiers, PerHeadRankTiers):
            return None
        found: list[Tensor] = []
        for _, store in self.held_stores:
            found += store.read_in_place if isinstance(store, TokenStore) else ()
        if isinstance(self.held_window, RingBuffer):
            found += self.held_window.read_in_place
        return tuple(found)

    def window_positions(self) -> tuple[Int[Tensor, "B H W"] | None, ...]:
        """Return for each part of a layer its tokens' positions if its pages store none."""
        stores: list[Int[Tensor, "B H W"] | None] = [None for _ in self.held_stores]
        raw = self.held_window
        if raw is not None:
            stores.append(raw.position[:, None].expand(-1, self.shape.kv_heads, -1))
        return tuple(stores)

    def groups(
        self,
        layer: int,
        fresh: DenseTokens,
        places: Sequence[Int[Tensor, "B H _"] | None] | None,
    ) -> list[HeadGroup] | None:
        """Return a layer's heads by kind, with the new tokens; None: all are of one kind.

        Args:
            layer: the layer.
            fresh: the tokens of the pass, padded to the longest vectors.
            places: positions of paged tokens, an entry per store and window, if needed.
        """
        if not isinstance(self.tiers, PerHeadRankTiers):
            return None
        stores = [store for _, store in self.held_stores]
        held = self.tiers.kinds, self.layout.shapes, stores, self.held_window
        return head_groups(*held, layer, fresh, places)

    @property
    def held_window(self) -> Window | None:
        """The raw window, if it holds tokens."""
        return self.window if self.columns else None

    def sizes(self, now: Pass | None = None) -> list[int]:
        """Count each sequence's tokens in all tiers, layers and heads, plus those of a pass."""
        held = self.tiers.counts().sum((0, 1, 3))
        if now is not None:
            held = held + (now.position >= 0).sum(1) * self.shape.layers * self.shape.kv_heads
        sizes: list[int] = held.tolist()
        return sizes

    @property
    def a_page_each(self) -> int:
        """Number of pages if each head of each layer and sequence has one."""
        sequences = len(self.seen) - len(self.vacant)
        return sequences * self.shape.layers * self.shape.kv_heads

    def table_rows(
        self, layers: slice = _ALL, sequences: Int[Tensor, " D"] | slice = _ALL
    ) -> Int[Tensor, " S"]:
        """Return the page table rows of sequences, grouped by layer; equal in all tiers."""
        every = self.stores[0].table_rows(layers).view(-1, len(self.seen), self.shape.kv_heads)
        return every[:, sequences].flatten()

    def by_head(self, x: Int[Tensor, "B S"]) -> Int[Tensor, "B H S"]:
        """Expand to one row per KV head."""
        return x[:, None].expand(-1, self.shape.kv_heads, -1)

    def column_order(self, now: Pass) -> Int[Tensor, "B T"]:
        """Return the column of each position, of the batch and a pass; columns of padding are last.

        Raises:
            ValueError: the columns of the batch are not recorded.
        """
        held = now.position >= 0
        if self.columns:
            if self.record is None:
                raise ValueError(
                    "queries choose columns of a batch over a shared pool, which does not record "
                    "its columns; use a cache with a pool of its own"
                )
            held = torch.cat((self.record.held, held), 1)
        return (~held).long().argsort(dim=1, stable=True)

    def grow(
        self,
        key: Float[Tensor, "S D"],
        value: Float[Tensor, "S Dv"],
        score: Float[Tensor, " S"] | None,
        position: Int[Tensor, " S"],
    ) -> None:
        """Append one token per head to the first tier, unless its position is -1."""
        stored = position if self.tiers.parts[0].layout.positions else None
        self.tiers.grow(position >= 0, key, value, score, stored)

    def reserve(self, tokens: Int[Tensor, " B"], spare: int = 0) -> None:
        """Reserve the pages for `tokens` tokens per head, once for all layers.

        Pages that the tiers already hold are subtracted, but not those of other batches.

        Args:
            tokens: tokens of each sequence in the first tier afterwards.
            spare: additional tokens per head that a growing pool allocates.

        Raises:
            kv_paging.PoolExhausted: a fixed pool is too small for them; nothing has changed.
        """
        if self.pool.grows:
            tokens = tokens + spare
        per_head = -(-tokens[:, None, None] // self.page_tokens[0])
        self.pool.reserve(max(0, int(per_head.sum()) - self.tiers.pages_held))

    def settle(self) -> None:
        """Free the pages that only a prompt needed, unless the pool is fixed or shared."""
        pool = self.pool
        table_rows = sum(store.length.numel() for store in self.tiers.parts)
        if pool.grows and not self.shares and pool.free > pool.used // 64 + table_rows:
            self.tiers.trim(also=self._beside)

    def advance(self, now: Pass) -> None:
        """Update positions and the tokens seen after a pass, in place and without the host."""
        if self.window is not None:
            self.window.advance(now.position, now.total)
        self.seen.copy_(now.total)

    def count(self, now: Pass) -> None:
        """Update what the host counts after a finished pass; it waits after prompts."""
        if now.is_prefill or not self.started:
            self.started = bool((now.total > 0).all())
        self.columns += now.position.shape[1]
        if self.record is not None:
            self.record.append(now.position >= 0)

    def fix(self, tokens: int) -> None:
        """Let the state of sequences stay where it is, for sequences of up to `tokens` tokens.

        Sequences then begin and end by `adopt` and `clear`, and `prepare` is called before each
        step, which may be captured.
        """
        self.tiers.fix(tokens)
        self.columns, self.started = 1, True

    def prepare(self, row: Int[Tensor, " B"]) -> None:
        """Reserve the pages of the next step, for the sequences whose `row` is not negative.

        Raises:
            kv_paging.PoolExhausted: the pool may have too few pages; nothing has changed.
            ValueError: a sequence is longer than was fixed.
        """

        def grows() -> Bool[Tensor, " B"]:  # a token leaves a full window
            return (row >= 0) & (self.seen >= self.window_size)

        self.tiers.prepare(grows, len(self.seen) - len(self.vacant))
        if self.window is not None:
            self.window.forget_tiles()

    def take_any_length(self) -> None:
        """Let the next step launch what is launched for sequences of any length, as is captured.

        The bounds of lengths are exact again after `prepare`.
        """
        for store in self.tiers.parts:
            store.set_longest(store.page_table.width * store.layout.tokens)
        if self.window is not None:
            self.window.forget_tiles()

    def adopt(self, sequence: int, other: "Batch") -> None:
        """Let the only sequence of a batch over the same pool take the place of a vacant one.

        All changes are in place, and the other batch is empty afterwards.

        Raises:
            ValueError: as `join`; nothing has changed.
        """
        self.layout.expect_same(other.layout)
        if self.window is not None and other.window is not None:
            self.window.expect_join(other.window)
        self.tiers.adopt(sequence, other.tiers)
        if self.window is not None and other.window is not None:
            self.window.adopt(sequence, other.window)
        self.seen[sequence], self.prefix_pages[sequence] = other.seen[0], other.prefix_pages[0]
        self.vacant.discard(sequence)
        other._forget()

    def clear(self, sequences: Collection[int]) -> None:
        """Free the pages of sequences, which are vacant then; synchronizes once."""
        rows = to_device(torch.tensor([*sequences]), self.seen.device)
        self.tiers.clear_in_place(rows, also=self._beside)
        if self.window is not None:
            self.window.clear(rows)
        self.seen[rows] = self.prefix_pages[rows] = 0
        self.vacant.update(sequences)

    def select(self, source: Int[Tensor, " B2"], *, share: bool = False) -> None:
        """Reorder sequences to source[0], source[1], ...: beams, repeats, subsets.

        With `share`, a sequence named again holds the same pages; see `Tiers.select`.

        Raises:
            kv_paging.PoolExhausted: too few pages for copies; nothing has changed.
            ValueError: a sequence does not exist, or `source` is empty; see `release`.
        """
        self.tiers.select(source, also=self._beside, share=share)
        if self.window is not None:
            self.window.reorder(source)
        if self.record is not None:
            self.record.select(source)
        self.seen, self.prefix_pages = self.seen[source], self.prefix_pages[source]

    def branch(self, sequence: int, other: "Batch", *, share: bool, whole: bool = False) -> None:
        """Let the only sequence of an empty batch over the same pool continue one of these.

        Args:
            sequence: its number.
            other: the empty batch, whose sequence is vacant.
            share: whether both hold the same full pages; otherwise they are copied.
            whole: whether no page is copied; then one of the two must be released before either
                changes.

        Raises:
            kv_paging.PoolExhausted: too few pages for copies; nothing has changed.
        """
        also = tuple(zip(self._beside, other._beside, strict=True))
        if self.layout.pages[0][0].bounds:  # computed once for all that continue it
            self.tiers.parts[0].update_bounds()
        self.tiers.branch(sequence, other.tiers, also, share=share, whole=whole)
        if self.window is not None and other.window is not None:
            self.window.branch(sequence, other.window)
        other.seen = self.seen[sequence : sequence + 1].clone()
        other.columns, other.started = self.columns, True
        other.vacant.clear()

    def count_prefix_pages(self) -> None:
        """Count the pages that stored prefixes hold, too; appended tokens change no such page.

        Synchronizes with the device if the pool shares pages.
        """
        self.prefix_pages.copy_(self.tiers.shared_pages())

    def join(self, other: "Batch") -> None:
        """Append the sequences of a batch over the same pool, which empties it.

        Pages change their owner without being copied.

        Raises:
            ValueError: the layout, pool or window type differs; nothing has changed.
        """
        self.layout.expect_same(other.layout)
        if self.window is not None and other.window is not None:
            self.window.expect_join(other.window)
        self.tiers.join(other.tiers)
        if self.window is not None and other.window is not None:
            self.window.join(other.window)
        self.seen = torch.cat((self.seen, other.seen))
        self.prefix_pages = torch.cat((self.prefix_pages, other.prefix_pages))
        self.columns = max(self.columns, other.columns)
        self.started = self.started and other.started
        other._forget()

    def release(self) -> None:
        """Remove all sequences and free their pages; others may join later."""
        self.tiers.release()
        if self.window is not None:
            self.window.release()
        self._forget()

    def _forget(self) -> None:
        self.seen, self.columns, self.record = self.seen[:0], 0, None
        self.prefix_pages = self.prefix_pages[:0]
        self.started = True  # vacuously true

    def pages_used(self) -> Int[Tensor, " B"]:
        """Count each sequence's pages over all stores, layers and heads, without a device sync."""
        each = [store.sequence_pages() for store in (*self.tiers.parts, *self._beside)]
        return torch.stack(each).sum(0)

    def rename(self, ids: Int[Tensor, " P1"]) -> None:
        """Replace page id i by ids[i], after `PagePool.withdraw` moved pages."""
        self.tiers.rename(ids, also=self._beside)

    def pages(self) -> Int[Tensor, " n"]:
        """Return the ids of the batch's pages; for `PagePool.check`."""
        return torch.cat([store.pages() for store in (*self.tiers.parts, *self._beside)])

    @property
    def unchanging(self) -> tuple[object, ...]:
        """The objects that copies of a batch share: page layouts and kernels."""
        stores = (*self.tiers.parts, *self._beside)
        return (self.layout, *(x for s in stores for x in (s.layout, s.kernels)))

    @property
    def _beside(self) -> tuple[TokenStore, ...]:
        """Stores over the pool that belong to no tier."""
        return () if self.window is None else self.window.stores

    def take_back(self, columns: int) -> None:
        """Remove the newest columns, with each sequence's tokens in them.

        Raises:
            ValueError: there are fewer columns, or removal is not supported.
        """
        if self.record is None or not 0 <= columns <= self.columns:
            raise ValueError(
                f"{columns} columns cannot be taken back: the cache holds {self.columns}"
            )
        seen = self.seen - self.record.tokens(columns)
        self.tiers.truncate(seen)
        self.record.drop(columns)
        self.seen, self.columns = seen, self.columns - columns
        self.started = bool((seen > 0).all())

    def memory(self, full_token_bytes: int, basis_bytes: int) -> MemoryReport:
        """Count the stored bytes, and those of an uncompressed cache with this size per token."""
        basis = basis_bytes, int(self.seen.sum()) * full_token_bytes
        record = 0 if self.record is None else self.record.nbytes
        kept = [store.bounds.nbytes for store in self.tiers.parts if store.bounds is not None]
        return MemoryReport.of(self.pool, self.tiers, self.window, *basis, record, sum(kept))


def rolls_back(policy: KVPolicy) -> bool:
    """Return whether the newest tokens can be removed: all are stored, each independently."""
    formats = policy.formats
    return policy.capabilities.rolls_back and not (formats and formats.window)
