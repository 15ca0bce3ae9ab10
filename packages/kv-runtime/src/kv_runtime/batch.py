"""The storage of one batch: pool, tiers, raw window, and how many tokens were seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import DenseTokens, HeadGroup
from kv_paging import PagePool, PerHeadRankStore, PerHeadRankTiers, Tiers, TokenStore
from kv_policy import DROP, NOBODY, CacheShape, KVPolicy, PagedTokens
from kv_runtime.columns import Columns
from kv_runtime.forward_pass import Pass, flat, grid
from kv_runtime.heads import head_groups
from kv_runtime.layout import Layout
from kv_runtime.memory import MemoryReport
from kv_runtime.window.base import RingBuffer, Window

__all__ = ["Batch", "Pass", "flat", "grid"]

_ALL = slice(None)


@dataclass
class Batch:
    """Pages of every tier and the raw window, for all layers of a batch of sequences."""

    layout: Layout
    pool: PagePool
    tiers: Tiers | PerHeadRankTiers
    window: Window | None
    seen: Int[Tensor, " B"]  # tokens per sequence
    columns: int = field(default=0)  # columns of the batch, padding included
    started: bool = field(default=False)  # every sequence has a token
    shares: bool = field(default=False)  # the pool, with others
    record: Columns | None = field(default=None)  # of columns; None: the host keeps none

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
    ) -> "Batch":
        """Make room for a batch.

        Args:
            policy: what to keep.
            layout: of its pages.
            sequences: B.
            pages: of a pool of its own; None lets that grow as tokens arrive.
            device: where the batch lives.
            kernels: who writes and reads the pages of a pool of its own.
            pool: a pool that is shared with other batches, instead of one of its own.
            window_in_pages: the raw window lies in the pool, too.

        Raises:
            kv_paging.PoolExhausted: a fixed pool is too small for the raw window.
            ValueError: pages and a pool are given, or the pool's pages are of another size.
        """
        if pool is not None and pages is not None:
            raise ValueError(f"a pool and {pages} pages are given; give one, or none to grow")
        shares = pool is not None
        pool = pool or PagePool(
            layout.page_bytes, pages or 0, grows=pages is None, device=device, kernels=kernels
        )
        tiers = layout.tiers(pool, sequences)
        scores = policy.selector is not None
        return cls(
            layout=layout,
            pool=pool,
            tiers=tiers,
            window=layout.raw_window(tiers, sequences, device, scores, window_in_pages),
            seen=torch.zeros(sequences, dtype=torch.long, device=device),
            shares=shares,
            record=None if shares else Columns(sequences, device),
        )

    @property
    def shape(self) -> CacheShape:
        """What is stored: heads, and the dimensions of the longest vectors."""
        return self.layout.shape

    @property
    def window_size(self) -> int:
        """Tokens of the raw window."""
        return self.layout.window

    @property
    def page_tokens(self) -> Int[Tensor, "K N H"]:
        """Tokens in a page of each tier, layer and head."""
        return self.layout.page_tokens.to(self.seen.device)

    @property
    def stores(self) -> tuple[TokenStore | PerHeadRankStore, ...]:
        """Where tokens lie, in the order attention sees them; a tier may have two."""
        return self.tiers.stores

    @property
    def held_stores(self) -> list[tuple[int, TokenStore | PerHeadRankStore]]:
        """Tier and store, of those that may hold something of a layer that is attended to.

        In the first pass they hold at most what layers before it have just stored.
        """
        pairs = zip(self.tiers.tier, self.stores, strict=True)
        return [(tier, store) for tier, store in pairs if self.columns and store.longest]

    def views(self, layer: int) -> tuple[list[PagedTokens], list[DenseTokens]]:
        """Give what a layer holds in pages and beside them, where all heads are alike.

        Good until the next operation.
        """
        stores = [store for _, store in self.held_stores]
        pages = [store.view(layer) for store in stores if isinstance(store, TokenStore)]
        raw = self.held_window
        if not isinstance(raw, RingBuffer):
            return pages, []
        window = raw.view(slice(layer, layer + 1))
        return ([*pages, window], []) if isinstance(window, PagedTokens) else (pages, [window])

    def groups(
        self,
        layer: int,
        fresh: DenseTokens,
        places: Sequence[Int[Tensor, "B H _"] | None] | None,
    ) -> list[HeadGroup] | None:
        """Give what the heads of a layer hold, by kind, with fresh tokens; None: all are alike.

        Args:
            layer: whose heads.
            fresh: the tokens of the pass, as long as the longest vectors.
            places: positions of what lies in pages, an entry for each store and window, if needed.
        """
        if not isinstance(self.tiers, PerHeadRankTiers):
            return None
        stores = [store for _, store in self.held_stores]
        held = self.tiers.kinds, self.layout.shapes, stores, self.held_window
        return head_groups(*held, layer, fresh, places)

    @property
    def held_window(self) -> Window | None:
        """The raw window, once it holds something."""
        return self.window if self.columns else None

    def sizes(self, now: Pass | None = None) -> list[int]:
        """Tokens of each sequence in all tiers, layers and heads; those of a pass included."""
        held = self.tiers.counts().sum((0, 1, 3))
        if now is not None:
            held = held + (now.position >= 0).sum(1) * self.shape.layers * self.shape.kv_heads
        sizes: list[int] = held.tolist()
        return sizes

    @property
    def a_page_each(self) -> int:
        """How many pages are one for each table row: each head of each layer of each sequence."""
        return len(self.seen) * self.shape.layers * self.shape.kv_heads

    def table_rows(
        self, layers: slice = _ALL, sequences: Int[Tensor, " D"] | slice = _ALL
    ) -> Int[Tensor, " S"]:
        """Table row ids of sequences in layers, layer after layer; alike in all tiers."""
        every = self.stores[0].table_rows(layers).view(-1, len(self.seen), self.shape.kv_heads)
        return every[:, sequences].flatten()

    def by_head(self, x: Int[Tensor, "B S"]) -> Int[Tensor, "B H S"]:
        """One row per KV head."""
        return x[:, None].expand(-1, self.shape.kv_heads, -1)

    def grow(
        self,
        key: Float[Tensor, "S D"],
        value: Float[Tensor, "S Dv"],
        score: Float[Tensor, " S"] | None,
        position: Int[Tensor, " S"],
    ) -> None:
        """Put one token of each table row into the first tier, but where its position is -1."""
        absent = position < 0
        kinds = torch.zeros_like(position, dtype=torch.uint8)
        self.tiers.step(
            candidate=kinds.masked_fill(absent, DROP),
            victim=kinds + NOBODY,
            target=kinds + DROP,
            place=position.new_full((self.tiers.tiers, len(position)), -1),
            key=key,
            value=value,
            score=score,
            position=position if self.tiers.parts[0].layout.positions else None,
        )

    def reserve(self, tokens: Int[Tensor, " B"], spare: int = 0) -> None:
        """Make sure of the pages for so many tokens per head, once instead of layer by layer.

        The pages that the tiers hold are counted off, those of other batches are not theirs.

        Args:
            tokens: tokens that the first tier will hold of each sequence.
            spare: tokens more per head that a growing pool makes room for.

        Raises:
            kv_paging.PoolExhausted: a fixed pool is too small for them; nothing has changed.
        """
        if self.pool.grows:
            tokens = tokens + spare
        per_head = -(-tokens[:, None, None] // self.page_tokens[0])
        self.pool.reserve(max(0, int(per_head.sum()) - self.tiers.pages_used))

    def settle(self) -> None:
        """Give back what a prompt made room for, unless the pool is fixed or others share it."""
        pool = self.pool
        table_rows = sum(store.length.numel() for store in self.tiers.parts)
        if pool.grows and not self.shares and pool.free > pool.used // 64 + table_rows:
            self.tiers.trim(also=self._beside)

    def end(self, now: Pass) -> None:
        """Count what a finished pass brought."""
        if self.window is not None:
            self.window.advance(now.position, now.total)
        if now.is_prefill or not self.started:
            self.started = bool((now.total > 0).all())
        self.seen = now.total
        self.columns += now.position.shape[1]
        if self.record is not None:
            self.record.append(now.position >= 0)

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Sequences become source[0], source[1], ...: beams, repeats, subsets.

        Raises:
            kv_paging.PoolExhausted: too few pages for copies; nothing has changed.
            ValueError: a sequence that does not exist, or none; see `release`.
        """
        self.tiers.select(source, also=self._beside)
        if self.window is not None:
            self.window.reorder(source)
        if self.record is not None:
            self.record.select(source)
        self.seen = self.seen[source]

    def join(self, other: "Batch") -> None:
        """Let the sequences of a batch over the same pool come after these; it has none then.

        Pages change their owner, and no byte of one moves.

        Raises:
            ValueError: another layout, pool or sort of window; nothing has changed.
        """
        self.layout.expect_same(other.layout)
        if self.window is not None and other.window is not None:
            self.window.expect_join(other.window)
        self.tiers.join(other.tiers)
        if self.window is not None and other.window is not None:
            self.window.join(other.window)
        self.seen = torch.cat((self.seen, other.seen))
        self.columns = max(self.columns, other.columns)
        self.started = self.started and other.started
        other._forget()

    def release(self) -> None:
        """Let all sequences go, with all pages; there is none then, until others join."""
        self.tiers.release()
        if self.window is not None:
            self.window.release()
        self._forget()

    def _forget(self) -> None:
        self.seen, self.columns, self.record = self.seen[:0], 0, None
        self.started = True  # true of every sequence, as there is none

    def pages_used(self) -> Int[Tensor, " B"]:
        """Count the pages of each sequence over all stores, layers and heads, without waiting."""
        each = [store.sequence_pages() for store in (*self.tiers.parts, *self._beside)]
        return torch.stack(each).sum(0)

    def pages(self) -> Int[Tensor, " n"]:
        """Give the ids of all pages the batch holds; for `PagePool.check`."""
        return torch.cat([store.pages() for store in (*self.tiers.parts, *self._beside)])

    @property
    def unchanging(self) -> tuple[object, ...]:
        """What copies of a batch share: how pages are laid out, and the code for them."""
        stores = (*self.tiers.parts, *self._beside)
        return (self.layout, *(x for s in stores for x in (s.layout, s.kernels)))

    @property
    def _beside(self) -> tuple[TokenStore, ...]:
        """Stores over the pool that are no tier's."""
        return () if self.window is None else self.window.stores

    def take_back(self, columns: int) -> None:
        """Forget the newest columns, with the tokens that each sequence has in them.

        Raises:
            ValueError: there are not so many columns, or none can be taken back.
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
        """Count what is held, beside an uncompressed cache that takes so much for a token."""
        basis = basis_bytes, int(self.seen.sum()) * full_token_bytes
        record = 0 if self.record is None else self.record.nbytes
        return MemoryReport.of(self.pool, self.tiers, self.window, *basis, record)


def rolls_back(policy: KVPolicy) -> bool:
    """Whether the newest tokens of a cache can be taken back: all are stored, each alone."""
    formats = policy.formats
    return policy.capabilities.rolls_back and not (formats and formats.window)
