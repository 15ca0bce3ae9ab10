"""Which pages a stream holds: page tables, and the prefix sum that deals out pages to streams."""

from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

Length = TypeVar("Length", int, Tensor)


def pages_for(length: Length, tokens: int) -> Length:
    """Count the pages that hold `length` tokens at `tokens` tokens a page."""
    return (length + (tokens - 1)) // tokens


def spread(
    first: Int[Tensor, " S"], count: Int[Tensor, " S"], total: int
) -> tuple[Int[Tensor, " total"], Int[Tensor, " total"]]:
    """List the columns first[i] to first[i] + count[i] - 1 of every row i, as rows and columns.

    Item k of the list is page k of what is taken or given back: the prefix sum over the rows' needs
    is all the coordination there is (LeanKV section 5.3). `total` is the sum of `count`, which the
    caller has read, so that nothing here waits for the device.
    """
    each = torch.arange(count.shape[0], device=count.device)
    row = torch.repeat_interleave(each, count, output_size=total)
    start = first - (count.cumsum(0) - count)
    column = torch.arange(total, device=count.device) + start[row]
    return row, column


class PageTable:
    """The page ids of every stream, from the left; past a stream's last page they are stale."""

    def __init__(self, streams: int, device: torch.device) -> None:
        """Start with one column; id 0 stands where no page was entered yet."""
        self._ids = torch.zeros(streams, 1, dtype=torch.int32, device=device)

    @property
    def ids(self) -> Int[Tensor, "streams T"]:
        """The table; widening and reordering replace this tensor."""
        return self._ids

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._ids.numel() * self._ids.itemsize

    def widen(self, columns: int) -> None:
        """Make room for `columns` pages a stream; an eighth at least, so that it happens rarely."""
        streams, width = self._ids.shape
        if columns > width:
            more = max(columns - width, width // 8)
            self._ids = torch.cat((self._ids, self._ids.new_zeros(streams, more)), 1)

    def block(self, streams: Int[Tensor, " S"], columns: int) -> Int[Tensor, "S columns"]:
        """Give the first `columns` page ids of streams, stale ones included; all exist."""
        return self._ids[streams, :columns].long()

    def within(self, count: Int[Tensor, " streams"], total: int | None = None) -> Int[Tensor, " n"]:
        """Give the first `count` page ids of every stream; `total` is their sum, if it is known."""
        total = int(count.sum()) if total is None else total
        return self.lookup(*spread(torch.zeros_like(count), count, total))

    def lookup(self, streams: Int[Tensor, "*n"], column: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Give the page id at `column[i]` of stream `streams[i]`."""
        return self._ids[streams, column].long()

    def enter(
        self, streams: Int[Tensor, " n"], column: Int[Tensor, " n"], pages: Int[Tensor, " n"]
    ) -> None:
        """Put page ids at `column[i]` of stream `streams[i]`."""
        self._ids[streams, column] = pages.to(self._ids.dtype)

    def reorder(self, streams: Int[Tensor, " n"]) -> None:
        """Let stream i become a copy of the row that `streams[i]` has now."""
        self._ids = self._ids[streams]
