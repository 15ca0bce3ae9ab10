"""Page tables, and the prefix sum that assigns pages to table rows."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kv_policy import PagedTokens

Length = TypeVar("Length", int, Tensor)


def pages_for(length: Length, tokens: int) -> Length:
    """Return the number of pages for `length` tokens at `tokens` tokens per page."""
    return (length + (tokens - 1)) // tokens


def columns_for(total: int, tokens: int) -> int:
    """Return a bound of the pages of two tiers with `total` tokens of a table row together.

    Each tier may have a partial page, so this is one more than a single tier needs at `tokens`, the
    smaller of their tokens per page: ceil(a / t) + ceil(b / u) <= ceil((a + b) / t) + 1 for u >= t.
    LeanKV section 5.2 gives its table ceil((a + b) / t) entries, which a row of one token in each
    tier overflows.
    """
    return pages_for(total, tokens) + 1


def spread(
    first: Int[Tensor, " S"], count: Int[Tensor, " S"], total: int
) -> tuple[Int[Tensor, " total"], Int[Tensor, " total"]]:
    """List the columns first[i] to first[i] + count[i] - 1 of every row i, as rows and columns.

    Item k of the list is page k of those allocated or released: the prefix sum over the rows'
    counts is the only coordination (LeanKV section 5.3). `total` is the sum of `count`, which the
    caller has read, so this does not synchronize with the device.
    """
    each = torch.arange(count.shape[0], device=count.device)
    row = torch.repeat_interleave(each, count, output_size=total)
    start = first - (count.cumsum(0) - count)
    column = torch.arange(total, device=count.device) + start[row]
    return row, column


@dataclass(slots=True)
class _Ids:
    """The ids, shared by both sides of a table."""

    ids: Int[Tensor, "table_rows T"]


class PageTable:
    """The page ids of every table row, by column; entries past its last page are stale.

    A table has two sides: one tier counts columns from the left, and another, through `facing`,
    from the right of the same rows (LeanKV section 5.2).
    """

    def __init__(self, table_rows: int, device: torch.device) -> None:
        """Create a table of one column, filled with id 0."""
        self._shared = _Ids(torch.zeros(table_rows, 1, dtype=torch.int32, device=device))
        self.reverse = False

    @classmethod
    def over(cls, pages: PagedTokens) -> "PageTable":
        """Return the side of a table that belongs to a tier of table rows with a head each."""
        table = object.__new__(cls)
        table._shared, table.reverse = _Ids(pages.table[:, 0]), pages.reverse
        return table

    def facing(self) -> "PageTable":
        """Return the other side of the same table."""
        other = object.__new__(PageTable)
        other._shared, other.reverse = self._shared, not self.reverse
        return other

    def shares_with(self, other: "PageTable") -> bool:
        """Return whether both are sides of one table, or the same side."""
        return self._shared is other._shared

    @property
    def ids(self) -> Int[Tensor, "table_rows T"]:
        """The table; widening and reordering replace this tensor."""
        return self._shared.ids

    @property
    def width(self) -> int:
        """T, the columns of both sides together."""
        return self._shared.ids.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the table, both sides together."""
        return self.ids.numel() * self.ids.itemsize

    def widen(self, columns: int, left: Int[Tensor, " table_rows"] | None = None) -> None:
        """Widen the table to `columns` pages per table row, by at least an eighth to do so rarely.

        Args:
            columns: pages of both sides.
            left: pages of each row that are counted from the left, if there is another side:
                the columns after these remain at the right end.
        """
        ids, width = self.ids, self.width
        if columns <= width:
            return
        more = ids.new_zeros(ids.shape[0], max(columns - width, width // 8))
        self._shared.ids = _beside(ids, more, left)

    def join(
        self,
        other: "PageTable",
        layers: int,
        left: tuple[Int[Tensor, " table_rows"], Int[Tensor, " others"]] | None,
    ) -> None:
        """Append another table's rows, layer by layer; it has none afterwards.

        Args:
            other: a table of as many layers.
            layers: N; the table rows of a layer are consecutive.
            left: of both tables, as in `widen`.
        """
        columns = max(self.width, other.width)
        both = []
        for table, held in zip((self, other), left or (None, None), strict=True):
            ids = table.ids
            more = ids.new_zeros(len(ids), columns - table.width)
            both.append(_beside(ids, more, held).view(layers, len(ids) // layers, columns))
        self._shared.ids = torch.cat(both, 1).flatten(0, 1)
        other._shared.ids = other.ids[:0]

    def adopt(
        self,
        sequence: int,
        other: "PageTable",
        lead: tuple[int, int, int],
        left: Int[Tensor, " others"] | None,
    ) -> None:
        """Replace a sequence's rows by those of a table of one sequence, in place.

        The columns that are in use fit.

        Args:
            sequence: its number.
            other: a table of as many layers and heads, which has no rows afterwards.
            lead: layers, sequences and heads of this table.
            left: of the other table, as in `widen`.
        """
        layers, _, heads = lead
        width, ids = self.width, other.ids
        if other.width < width:
            ids = _beside(ids, ids.new_zeros(len(ids), width - other.width), left)
        elif other.width > width:
            first, last = ids[:, :width], ids[:, -width:]
            column = torch.arange(width, device=ids.device)
            ids = first if left is None else first.where(column < left[:, None], last)
        self.ids.view(*lead, width)[:, sequence] = ids.reshape(layers, heads, width)
        other._shared.ids = other.ids[:0]

    def take(self, other: "PageTable", table_rows: Int[Tensor, " n"]) -> None:
        """Have copies of the rows of another table in place of all of this one, on both sides."""
        self._shared.ids = other.ids[table_rows]

    def block(self, table_rows: Int[Tensor, " S"], columns: int) -> Int[Tensor, "S columns"]:
        """Return the first `columns` page ids of table rows, including stale ones; all exist."""
        if self.reverse:
            return self.ids[table_rows, max(self.width - columns, 0) :].flip(1).long()
        return self.ids[table_rows, :columns].long()

    def within(
        self, count: Int[Tensor, " table_rows"], total: int | None = None
    ) -> Int[Tensor, " n"]:
        """Return the first `count` page ids of every row; `total` is their sum, if known."""
        total = int(count.sum()) if total is None else total
        return self.lookup(*spread(torch.zeros_like(count), count, total))

    def lookup(self, table_rows: Int[Tensor, "*n"], column: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Return the page id at `column[i]` of table row `table_rows[i]`."""
        return self.ids[table_rows, self._place(column)].long()

    def enter(
        self, table_rows: Int[Tensor, " n"], column: Int[Tensor, " n"], pages: Int[Tensor, " n"]
    ) -> None:
        """Set page ids at `column[i]` of table row `table_rows[i]`."""
        self.ids[table_rows, self._place(column)] = pages.to(self.ids.dtype)

    def find(self, column: Int[Tensor, " table_rows"]) -> Int[Tensor, " table_rows"]:
        """Return the page id at a column of every table row; undefined for missing columns."""
        return self.ids.gather(1, self._inside(column))[:, 0].long()

    def enter_some(
        self,
        column: Int[Tensor, " table_rows"],
        pages: Int[Tensor, " table_rows"],
        some: Bool[Tensor, " table_rows"],
    ) -> None:
        """Set the page id at a column of each marked table row."""
        place = self._inside(column)
        kept = self.ids.gather(1, place)
        ids = pages.to(self.ids.dtype)[:, None].where(some[:, None], kept)
        self.ids.scatter_(1, place, ids)

    def reorder(self, table_rows: Int[Tensor, " n"]) -> None:
        """Replace table row i by a copy of the row `table_rows[i]`, on both sides."""
        self._shared.ids = self.ids[table_rows]

    def rename(self, ids: Int[Tensor, " P1"]) -> None:
        """Replace page id i by ids[i], on both sides; stale entries, too, remain valid ids."""
        self.ids.copy_(ids[self.ids.long()])

    def _place(self, column: Tensor) -> Tensor:
        return self.width - 1 - column if self.reverse else column

    def _inside(self, column: Tensor) -> Tensor:
        return self._place(column.clamp(0, self.width - 1))[:, None]


def _beside(ids: Tensor, more: Tensor, left: Tensor | None) -> Tensor:
    """Insert columns at the right end, or between the sides after `left` columns."""
    wider = torch.cat((ids, more), 1)
    if left is None:
        return wider
    column = torch.arange(wider.shape[1], device=ids.device)
    return wider.where(column < left[:, None], torch.cat((more, ids), 1))
