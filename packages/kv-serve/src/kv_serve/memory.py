"""What a cache holds, in bytes, by name."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a compressed cache holds; the named parts add up to `total_bytes`."""

    vector_bytes: int  # stored keys and values with their scales, of kept tokens
    score_bytes: int  # float32 scores of kept tokens
    position_bytes: int  # int32 positions of kept tokens
    unfilled_bytes: int  # places of pages in use that hold no token, and page ends
    spare_bytes: int  # free pages of the pool
    window_bytes: int  # raw recent tokens, with their positions and scores
    table_bytes: int  # page tables, lengths, the list of free pages
    basis_bytes: int  # maps between vectors and what is stored, where the policy has a basis
    full_bytes: int  # what an uncompressed cache takes for the tokens seen
    pages_used: int
    pages_free: int
    page_bytes: int  # of one page
    tokens: Int[Tensor, "N B H"]  # kept per layer, sequence and KV head, the window included

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
