"""The largest and the smallest numbers of keys, by channel, in the full pages of table rows."""

from dataclasses import replace
from typing import Final

import torch
from jaxtyping import BFloat16, Bool, Float, Int
from torch import Tensor

from kv_paging.kernels import PageKernels
from kv_paging.table import PageTable, spread
from kv_policy import PagedTokens

DTYPE: Final = torch.bfloat16  # 2 bytes for the range of float32
READ: Final = 1 << 21  # numbers of keys that are decoded together
SPARE: Final = 32  # columns that are allocated beyond those needed


def bound_bytes(dim: int) -> int:
    """Return the bytes of the bounds of a page, whose keys have `dim` dimensions."""
    return 2 * dim * DTYPE.itemsize


class KeyBounds:
    """Bounds of the decoded keys in the first pages of each table row of a store.

    They are of full pages alone, as the page that is appended to changes, and rounded outwards: no
    stored key is outside. The store says which pages change, and `update` computes what is missing.
    """

    def __init__(self, table_rows: int, dim: int, device: torch.device) -> None:
        """Create bounds of no page, for keys of `dim` dimensions."""
        self.dim = dim
        self.both: BFloat16[Tensor, "S T 2D"] = torch.empty(
            table_rows, 0, 2 * dim, dtype=DTYPE, device=device
        )
        self.count: Int[Tensor, " S"] = torch.zeros(table_rows, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the bounds, with the columns allocated ahead."""
        return sum(x.numel() * x.itemsize for x in (self.both, self.count))

    def forget(self, table_rows: Int[Tensor, " S"], some: Bool[Tensor, " S"] | None = None) -> None:
        """Drop the bounds of table rows whose tokens change; of the marked ones, if given."""
        kept = 0 if some is None else self.count[table_rows].masked_fill(some, 0)
        self.count[table_rows] = kept

    def cut(self, table_rows: Int[Tensor, " S"], pages: Int[Tensor, " S"]) -> None:
        """Drop the bounds past the first `pages` pages of table rows."""
        self.count[table_rows] = self.count[table_rows].minimum(pages)

    def reorder(self, rows: Int[Tensor, " S2"]) -> None:
        """Assign the bounds of rows[i] to table row i."""
        self.both, self.count = self.both[rows], self.count[rows]

    def clear(self, table_rows: int) -> None:
        """Drop everything, for another number of table rows."""
        self.both = self.both.new_empty(table_rows, 0, 2 * self.dim)
        self.count = self.count.new_zeros(table_rows)

    def update(self, whole: PagedTokens, table: PageTable, kernels: PageKernels) -> None:
        """Compute the bounds of the full pages that have none.

        Decodes their keys, some pages at a time; synchronizes with the device.

        Args:
            whole: all table rows, as page kernels read them.
            table: their page table.
            kernels: what decodes the keys.
        """
        tokens = whole.layout.tokens
        full = whole.length.flatten().long() // tokens
        if full.numel() != self.count.numel():
            self.clear(full.numel())
        missing = (full - self.count).clamp(min=0)
        total, most = torch.stack((missing.sum(), full.max())).tolist() if full.numel() else (0, 0)
        if not total:
            return
        self._widen(most)
        row, column = spread(self.count, missing, total)
        size = max(1, READ // (tokens * self.dim))
        for rows, columns in zip(row.split(size), column.split(size), strict=True):
            page = table.lookup(rows, columns)[:, None, None]
            alone = torch.arange(len(rows), device=row.device)
            length = whole.length.new_full((len(rows), 1), tokens)
            each = replace(whole, table=page, length=length, reverse=False, longest=tokens)
            found = kernels.read(each, alone, tokens, frozenset({"keys"}))
            assert found.key is not None, "requested"
            self.both[rows, columns] = bounds_of(found.key, found.held)
        self.count = torch.maximum(self.count, full)

    def _widen(self, columns: int) -> None:
        rows, width, dims = self.both.shape
        if columns > width:
            wider = self.both.new_empty(rows, columns + SPARE, dims)
            wider[:, :width] = self.both
            self.both = wider


def bounds_of(key: Float[Tensor, "S L D"], held: Bool[Tensor, "S L"]) -> BFloat16[Tensor, "S _"]:
    """Return the largest numbers of the keys of each row, then the smallest, rounded outwards.

    Those of a row without a key are below every query's other bounds.
    """
    gone, most = ~held[..., None], torch.finfo(key.dtype).max  # infinity times 0 is not a number
    high = key.masked_fill(gone, -most).amax(1)
    low = key.masked_fill(gone, most).amin(1)
    return torch.cat((_upwards(high), -_upwards(-low)), 1)


def _upwards(x: Float[Tensor, "*S"]) -> BFloat16[Tensor, "*S"]:
    """Round to the next larger number that has 2 bytes."""
    near = x.to(DTYPE)
    infinity = torch.full_like(near, torch.inf)
    return torch.where(near.to(x.dtype) < x, torch.nextafter(near, infinity), near)
