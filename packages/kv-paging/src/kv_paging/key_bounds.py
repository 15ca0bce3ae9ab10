"""Bounds of the keys in the full pages of table rows, or codes of them."""

from typing import Final

import torch
from jaxtyping import BFloat16, Bool, Int, UInt8
from torch import Tensor

from kv_paging.bounding import DTYPE, bounds_in
from kv_paging.kernels import PageKernels
from kv_policy import PagedTokens, PageLayout
from kv_policy.key_codes import code_rotation
from kv_policy.pages import bound_bytes

SPARE: Final = 32  # columns that are allocated beyond those needed


class KeyBounds:
    """Bounds of the decoded keys in the first pages of each table row of a store.

    They are of full pages alone, as the page that is appended to changes, and rounded outwards: no
    stored key is outside. The store says which pages change, and `update` computes what is missing.

    They are in the pages themselves if the layout has them there, by the number of a page: they
    move, are copied and are freed with it. Otherwise they are in memory of their own, by table row.

    Codes of the keys (`kv_policy.key_codes`) may be in the place of bounds.
    """

    def __init__(
        self, table_rows: int, layout: PageLayout, device: torch.device, coded: bool = False
    ) -> None:
        """Create bounds of no page, or no codes, for the keys of a layout.

        Raises:
            ValueError: pages of the layout have codes and `coded` is false, or the reverse.
        """
        self.in_pages = layout.bounds
        if self.in_pages and coded != layout.coded:
            held = "codes" if layout.coded else "bounds"
            raise ValueError(
                f"pages of this layout have {held} of their keys, and coded={coded}; use a layout "
                f"with coded={coded}"
            )
        if coded:
            code_rotation(layout.format.key.dim, device)  # no step copies it to the device
        dtype = torch.uint8 if coded else DTYPE
        width = bound_bytes(layout.format.key.dim, layout.tokens, coded) // dtype.itemsize
        lead = (0,) if self.in_pages else (table_rows, 0)
        self.both: (
            BFloat16[Tensor, "S T _"]
            | BFloat16[Tensor, "P _"]
            | UInt8[Tensor, "S T _"]
            | UInt8[Tensor, "P _"]
        ) = torch.empty(*lead, width, dtype=dtype, device=device)
        self.count: Int[Tensor, " S"] = torch.zeros(table_rows, dtype=torch.long, device=device)
        self._changes = -1  # of the store at the last update, if steps alone have followed

    @property
    def nbytes(self) -> int:
        """Bytes of the bounds outside of pages, with the columns allocated ahead."""
        own = (self.count,) if self.in_pages else (self.both, self.count)
        return sum(x.numel() * x.itemsize for x in own)

    def forget(self, table_rows: Int[Tensor, " S"], some: Bool[Tensor, " S"] | None = None) -> None:
        """Drop the bounds of table rows whose tokens change; of the marked ones, if given."""
        kept = 0 if some is None else self.count[table_rows].masked_fill(some, 0)
        self.count[table_rows] = kept
        self._changes = -1

    def cut(self, table_rows: Int[Tensor, " S"], pages: Int[Tensor, " S"]) -> None:
        """Drop the bounds past the first `pages` pages of table rows."""
        self.count[table_rows] = self.count[table_rows].minimum(pages)
        self._changes = -1

    def reorder(self, rows: Int[Tensor, " S2"]) -> None:
        """Assign the bounds of rows[i] to table row i."""
        if not self.in_pages:
            self.both = self.both[rows]
        self.count = self.count[rows]
        self._changes = -1

    def join(self, other: "KeyBounds", lead: tuple[int, ...], others: tuple[int, ...]) -> None:
        """Append the bounds of the other's sequences in every layer; those outside of pages go.

        Args:
            other: the other bounds.
            lead: layers, sequences and heads of these.
            others: those of the other.
        """
        if not self.in_pages:
            self.clear(lead[0] * (lead[1] + others[1]) * lead[2])
            return
        self.count = torch.cat((self.count.view(lead), other.count.view(others)), 1).flatten()
        self._changes = -1

    def branch(self, other: "KeyBounds", table_rows: Int[Tensor, " S"]) -> None:
        """Let other bounds have those of these table rows, whose pages they share or copy."""
        if other.in_pages:
            other.both, other.count = self.both, self.count[table_rows]
            other._changes = -1
        else:
            other.clear(len(table_rows))

    def clear(self, table_rows: int) -> None:
        """Drop everything, for another number of table rows."""
        if not self.in_pages:
            self.both = self.both.new_empty(table_rows, 0, self.both.shape[2])
        self.count = self.count.new_zeros(table_rows)
        self._changes = -1

    def update(self, whole: PagedTokens, kernels: PageKernels, changes: int) -> None:
        """Compute the bounds of the full pages that have none.

        Synchronizes with the device if the kernels do.

        Args:
            whole: all table rows, as page kernels read them, with a bound of their lengths.
            kernels: what reads the keys.
            changes: `HeadPages.changes` of the store, which steps do not change.
        """
        full = whole.length.flatten().long() // whole.layout.tokens
        if full.numel() != self.count.numel():
            self.clear(full.numel())
        if self.in_pages:
            self.both = bounds_in(whole.data, whole.layout)  # of a pool that may have grown
        assert whole.longest is not None, "a store has a bound"
        columns = whole.longest // whole.layout.tokens
        if not columns or not full.numel():
            return
        if not self.in_pages:
            self._widen(columns)
        # A step fills at most one page of a row; before, there may have been a prompt.
        kernels.bound(whole, self.count, self.both, 1 if changes == self._changes else columns)
        self.count = torch.maximum(self.count, full)
        self._changes = changes

    def _widen(self, columns: int) -> None:
        rows, width, dims = self.both.shape
        if columns > width:
            wider = self.both.new_empty(rows, columns + SPARE, dims)
            wider[:, :width] = self.both
            self.both = wider
