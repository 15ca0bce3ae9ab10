"""The storage of one batch: pool, tiers, raw window, and how many tokens were seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import DenseTokens, HeadGroup
from kv_paging import PagePool, RaggedStore, RaggedTiers, Tiers, TokenStore
from kv_policy import DROP, NOBODY, CacheShape, KVPolicy, PagedTokens
from kv_serve.layout import Layout
from kv_serve.memory import MemoryReport
from kv_serve.ragged_window import RaggedWindow
from kv_serve.window import RawWindow


@dataclass(frozen=True)
class Pass:
    """One forward pass: where its columns stand in their sequences."""

    position: Int[Tensor, "B L"]  # -1: padding
    total: Int[Tensor, " B"]  # tokens seen once the pass ends

    @property
    def prompt(self) -> bool:
        """Whether the pass brings more than one column: a prompt, or a part of one."""
        return self.position.shape[1] != 1


@dataclass
class Batch:
    """Pages of every tier and the raw window, for all layers of a batch of sequences."""

    layout: Layout
    pool: PagePool
    tiers: Tiers | RaggedTiers
    window: RawWindow | RaggedWindow | None
    seen: Int[Tensor, " B"]  # tokens per sequence
    columns: int = field(default=0)  # columns of the batch, padding included
    started: bool = field(default=False)  # every sequence has a token

    @classmethod
    def allocate(
        cls,
        policy: KVPolicy,
        layout: Layout,
        sequences: int,
        pages: int | None,
        device: torch.device,
        kernels: str | None = None,
    ) -> "Batch":
        """Make room for a batch; a pool without a size grows as tokens arrive."""
        pool = PagePool(
            layout.page_bytes, pages or 0, grows=pages is None, device=device, kernels=kernels
        )
        tiers = layout.tiers(pool, sequences)
        return cls(
            layout=layout,
            pool=pool,
            tiers=tiers,
            window=layout.raw_window(tiers, sequences, device, policy.selector is not None),
            seen=torch.zeros(sequences, dtype=torch.long, device=device),
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
    def token_bytes(self) -> int:
        """Bytes that a token of the first tier takes over all layers and heads."""
        return self.layout.token_bytes

    @property
    def stores(self) -> tuple[TokenStore | RaggedStore, ...]:
        """Where tokens lie, in the order attention sees them; a tier may have two."""
        return self.tiers.stores

    @property
    def held_stores(self) -> list[tuple[int, TokenStore | RaggedStore]]:
        """Tier and store, of those that may hold something of a layer that is attended to.

        In the first pass they hold at most what layers before it have just stored.
        """
        pairs = zip(self.tiers.tier, self.stores, strict=True)
        return [(tier, store) for tier, store in pairs if self.columns and store.longest]

    def views(self, layer: int) -> list[PagedTokens]:
        """Give a layer's pages, where all heads are alike; good until the next operation."""
        stores = [store for _, store in self.held_stores]
        return [store.view(layer) for store in stores if isinstance(store, TokenStore)]

    def dense(self, layer: int) -> list[DenseTokens]:
        """Give what stands in a layer's raw window, where all heads are alike."""
        raw = self.held_window
        if raw is None:
            return []
        return [DenseTokens(raw.keys(layer), raw.values(layer), raw.position, full=False)]

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
            places: positions of stored tokens, an entry for each of `held_stores`, if needed.
        """
        tiers, raw = self.tiers, self.held_window
        if not isinstance(tiers, RaggedTiers):
            return None
        stores = [store for _, store in self.held_stores]
        found = []
        for kind, shape in enumerate(self.layout.shapes):
            heads = tiers.kinds.heads(kind, layer)
            if not len(heads):
                continue
            key = fresh.key[:, heads, :, : shape.key_dim]
            dense = [replace(fresh, key=key, value=fresh.value[:, heads, :, : shape.value_dim])]
            if isinstance(raw, RaggedWindow):
                dense.insert(0, DenseTokens(*raw.of_kind(kind, layer), raw.position, full=False))
            found.append(
                HeadGroup(
                    heads,
                    tuple(s.view_kind(kind, layer) for s in stores if isinstance(s, RaggedStore)),
                    tuple(dense),
                    None
                    if places is None
                    else tuple(None if at is None else at[:, heads] for at in places),
                )
            )
        return found

    @property
    def held_window(self) -> RawWindow | RaggedWindow | None:
        """The raw window, once it holds something."""
        return self.window if self.columns else None

    def sizes(self, now: Pass) -> list[int]:
        """Tokens of each sequence over all layers and heads, those of the pass included."""
        held = self.tiers.counts().sum((0, 1, 3))
        fresh = (now.position >= 0).sum(1) * self.shape.layers * self.shape.kv_heads
        sizes: list[int] = (held + fresh).tolist()
        return sizes

    def streams(self, layer: int | None = None) -> Int[Tensor, " S"]:
        """Stream numbers of one layer, or of all; the same in every tier."""
        where = slice(None) if layer is None else slice(layer, layer + 1)
        return self.stores[0].streams(where)

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
        """Put one token of each stream into the first tier, but where its position is -1."""
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

        Args:
            tokens: tokens that the first tier will hold of each sequence.
            spare: tokens more per head that a growing pool makes room for.

        Raises:
            kv_paging.PoolExhausted: a fixed pool is too small for them; nothing has changed.
        """
        if self.pool.grows:
            tokens = tokens + spare
        per_head = -(-tokens[:, None, None] // self.page_tokens[0])
        self.pool.reserve(max(0, int(per_head.sum()) - self.pool.used))

    def settle(self) -> None:
        """Give back what a prompt made room for and did not need, where that is worth a copy."""
        pool = self.pool
        streams = sum(store.length.numel() for store in self.tiers.parts)
        if pool.grows and pool.free > pool.used // 64 + streams:
            self.tiers.trim()

    def end(self, now: Pass) -> None:
        """Count what a finished pass brought."""
        if self.window is not None:
            self.window.advance(now.position, now.total)
        if now.prompt or not self.started:
            self.started = bool((now.total > 0).all())
        self.seen = now.total
        self.columns += now.position.shape[1]

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Sequences become source[0], source[1], ...: beams, repeats, subsets."""
        self.tiers.select(source)
        if self.window is not None:
            self.window.select(source)
        self.seen = self.seen[source]

    def take_back(self, columns: int) -> None:
        """Forget the newest columns of every sequence, which must all be stored tokens.

        Raises:
            ValueError: some sequence has fewer tokens.
        """
        if columns < 0 or bool((self.seen < columns).any()):
            raise ValueError(
                f"{columns} tokens cannot be taken back: the shortest sequence has "
                f"{int(self.seen.min())}"
            )
        self.seen = self.seen - columns
        self.columns -= columns
        self.tiers.truncate(self.seen)

    def memory(self, full_token_bytes: int, basis_bytes: int) -> MemoryReport:
        """Count what is held, beside an uncompressed cache that takes so much for a token."""
        each = [(int(store.live.sum()), store.layout) for store in self.tiers.parts]
        vectors = sum(n * lay.format.nbytes // lay.format.block for n, lay in each)
        scores = sum(4 * n * lay.scores for n, lay in each)
        positions = sum(4 * n * lay.positions for n, lay in each)
        page = self.layout.page_bytes
        tokens = self.tiers.counts().sum(0)
        if self.window is not None:
            tokens = tokens + (self.window.position >= 0).sum(-1)[None, :, None]
        return MemoryReport(
            vector_bytes=vectors,
            score_bytes=scores,
            position_bytes=positions,
            unfilled_bytes=self.pool.used * page - vectors - scores - positions,
            spare_bytes=self.pool.free * page,
            window_bytes=self.window.nbytes if self.window is not None else 0,
            table_bytes=self.tiers.table_bytes + self.pool.table_bytes,
            basis_bytes=basis_bytes,
            full_bytes=int(self.seen.sum()) * full_token_bytes,
            pages_used=self.pool.used,
            pages_free=self.pool.free,
            page_bytes=page,
            tokens=tokens,
        )


def flat(x: Tensor) -> Tensor:
    """[B, H, ...] as one row per stream of a layer."""
    return x.flatten(0, 1)


def grid(x: Tensor, heads: int) -> Tensor:
    """One row per stream of a layer as [B, H, ...]."""
    return x.reshape(x.shape[0] // heads, heads, *x.shape[1:])
