"""The memory of a cache, in bytes by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging import PagePool, PerHeadRankTiers, Tiers
from kv_runtime.layout import Layout
from kv_runtime.window.base import Window

PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "vector_bytes": "keys and values",
        "score_bytes": "scores",
        "position_bytes": "positions",
        "unfilled_bytes": "empty slots of pages",
        "spare_bytes": "free pages",
        "window_bytes": "raw window",
        "table_bytes": "page tables",
        "bound_bytes": "bounds or codes of keys",
        "basis_bytes": "basis",
        "other_bytes": "layers not compressed",
    }
)
"""The parts that add up to the total, and what they hold."""


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Bytes of a compressed cache; the named parts add up to `total_bytes`.

    It prints as a table, also in a notebook.

    With a shared pool, used pages are the cache's own, and free pages are those of the pool. A page
    that several sequences hold is counted once, and its tokens for each of them.
    """

    vector_bytes: int  # keys and values with their scales, for tokens in pages
    score_bytes: int  # float32 scores of tokens in pages
    position_bytes: int  # int32 positions of tokens in pages
    unfilled_bytes: int  # empty slots of used pages, and page ends
    spare_bytes: int  # free pages of the pool
    window_bytes: int  # raw window outside pages, with its positions and scores
    table_bytes: int  # page tables, lengths, free list, flags of padded columns
    basis_bytes: int  # projection matrices, if the policy has a basis
    full_bytes: int  # an uncompressed cache for the tokens seen
    pages_used: int
    pages_free: int
    page_bytes: int  # of one page
    tokens: Int[
        Tensor, "N B H"
    ]  # kept tokens per layer, sequence and KV head, including the window
    other_bytes: int = 0  # layers that the policy does not store: sliding windows, states
    bound_bytes: int = 0  # bounds or codes of the keys in pages, if the policy reads by them; where
    # a pool is shared they are in the pages

    @classmethod
    def of(
        cls,
        pool: PagePool,
        tiers: Tiers | PerHeadRankTiers,
        window: Window | None,
        basis_bytes: int,
        full_bytes: int,
        record_bytes: int = 0,
        bound_bytes: int = 0,
    ) -> "MemoryReport":
        """Count the memory; the host synchronizes with the device."""
        each = [
            (int(x.live.sum()) - x.pages_repeated * x.layout.tokens, x.layout) for x in tiers.parts
        ]
        tokens, page, used = tiers.counts().sum(0), pool.page_bytes, tiers.pages_used
        if window is not None:
            filled = (window.position >= 0).sum(-1)
            tokens = tokens + filled[None, :, None]
            for store in window.stores:  # their heads have full length, including empty slots
                layers, _, heads = store.length.shape
                each.append((int(filled.sum()) * layers * heads, store.layout))
                used += store.pages_used
        vectors = sum(n * lay.format.nbytes // lay.format.block for n, lay in each)
        scores = sum(4 * n * lay.scores for n, lay in each)
        positions = sum(4 * n * lay.positions for n, lay in each)
        bounded = [x for x in tiers.parts if x.layout.bounds]
        inside = sum(x.pages_used * x.layout.bound_bytes for x in bounded)
        free = pool.free
        return cls(
            vector_bytes=vectors,
            score_bytes=scores,
            position_bytes=positions,
            unfilled_bytes=used * page - vectors - scores - positions - inside,
            spare_bytes=free * page,
            window_bytes=window.nbytes if window is not None else 0,
            table_bytes=tiers.table_bytes + pool.table_bytes + record_bytes,
            basis_bytes=basis_bytes,
            full_bytes=full_bytes,
            pages_used=used,
            pages_free=free,
            page_bytes=page,
            tokens=tokens,
            bound_bytes=bound_bytes + inside,
        )

    @classmethod
    def empty(cls, layout: Layout, basis_bytes: int) -> "MemoryReport":
        """Return the report of a cache before its first token."""
        none = torch.zeros(layout.shape.layers, 0, layout.shape.kv_heads, dtype=torch.long)
        return cls(0, 0, 0, 0, 0, 0, 0, basis_bytes, 0, 0, 0, layout.page_bytes, none)

    @property
    def pages_held_bytes(self) -> int:
        """Bytes of all pages, used or free."""
        return (self.pages_used + self.pages_free) * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """All bytes of the cache."""
        return sum(int(getattr(self, part)) for part in PARTS)

    @property
    def ratio(self) -> float:
        """Total bytes over the bytes of an uncompressed cache; 0 before the first token."""
        return self.total_bytes / self.full_bytes if self.full_bytes else 0.0

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return what is held, its bytes, and its share of an uncompressed cache."""
        found = {name: getattr(self, part) for part, name in PARTS.items()}
        every = {name: count for name, count in found.items() if count}
        every |= {"total": self.total_bytes, "uncompressed": self.full_bytes}
        full = self.full_bytes
        return [
            (name, f"{count:,}", f"{count / full:.2%}" if full else "")
            for name, count in every.items()
        ]

    def __repr__(self) -> str:
        """Return a table of the parts that hold bytes."""
        rows = (("", "bytes", ""), *self._rows())
        return "\n".join(f"{name:22}{count:>18}{share:>10}".rstrip() for name, count, share in rows)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        cells = ("".join(f"<td>{escape(x)}</td>" for x in row) for row in self._rows())
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        head = "<tr><th></th><th>bytes</th><th>of uncompressed</th></tr>"
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
