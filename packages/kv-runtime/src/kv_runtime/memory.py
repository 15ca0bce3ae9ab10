"""What a cache holds, in bytes, by name."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging import PagePool, PerHeadRankTiers, Tiers
from kv_runtime.layout import Layout
from kv_runtime.window.base import Window


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a compressed cache holds; the named parts add up to `total_bytes`.

    Where a pool is shared, pages in use are the cache's own, and free ones are everybody's.
    """

    vector_bytes: int  # keys and values with their scales, of tokens in pages
    score_bytes: int  # float32 scores of tokens in pages
    position_bytes: int  # int32 positions of tokens in pages
    unfilled_bytes: int  # places of pages in use that hold no token, and page ends
    spare_bytes: int  # free pages of the pool
    window_bytes: int  # raw recent tokens, with their positions and scores; none that are in pages
    table_bytes: int  # page tables, lengths, the list of free pages, which columns are padding
    basis_bytes: int  # maps between vectors and what is stored, where the policy has a basis
    full_bytes: int  # what an uncompressed cache takes for the tokens seen
    pages_used: int
    pages_free: int
    page_bytes: int  # of one page
    tokens: Int[Tensor, "N B H"]  # kept per layer, sequence and KV head, the window included

    @classmethod
    def of(
        cls,
        pool: PagePool,
        tiers: Tiers | PerHeadRankTiers,
        window: Window | None,
        basis_bytes: int,
        full_bytes: int,
        record_bytes: int = 0,
    ) -> "MemoryReport":
        """Count what is held; the host waits for the device."""
        each = [(int(store.live.sum()), store.layout) for store in tiers.parts]
        tokens, page, used = tiers.counts().sum(0), pool.page_bytes, tiers.pages_used
        if window is not None:
            filled = (window.position >= 0).sum(-1)
            tokens = tokens + filled[None, :, None]
            for store in window.stores:  # their table rows are of full length, empty slots included
                layers, _, heads = store.length.shape
                each.append((int(filled.sum()) * layers * heads, store.layout))
                used += store.pages_used
        vectors = sum(n * lay.format.nbytes // lay.format.block for n, lay in each)
        scores = sum(4 * n * lay.scores for n, lay in each)
        positions = sum(4 * n * lay.positions for n, lay in each)
        free = pool.free
        return cls(
            vector_bytes=vectors,
            score_bytes=scores,
            position_bytes=positions,
            unfilled_bytes=used * page - vectors - scores - positions,
            spare_bytes=free * page,
            window_bytes=window.nbytes if window is not None else 0,
            table_bytes=tiers.table_bytes + pool.table_bytes + record_bytes,
            basis_bytes=basis_bytes,
            full_bytes=full_bytes,
            pages_used=used,
            pages_free=free,
            page_bytes=page,
            tokens=tokens,
        )

    @classmethod
    def empty(cls, layout: Layout, basis_bytes: int) -> "MemoryReport":
        """Report of a cache before its first token."""
        none = torch.zeros(layout.shape.layers, 0, layout.shape.kv_heads, dtype=torch.long)
        return cls(0, 0, 0, 0, 0, 0, 0, basis_bytes, 0, 0, 0, layout.page_bytes, none)

    @property
    def pages_held_bytes(self) -> int:
        """Bytes of all pages, in use or free."""
        return (self.pages_used + self.pages_free) * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """Everything the cache holds."""
        return self.pages_held_bytes + self.window_bytes + self.table_bytes + self.basis_bytes

    @property
    def ratio(self) -> float:
        """Bytes held over the bytes of an uncompressed cache; 0 before the first token."""
        return self.total_bytes / self.full_bytes if self.full_bytes else 0.0
