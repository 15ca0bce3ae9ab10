"""The tokens that attention goes over, block by block: those in pages, and those in tensors.

Both kinds answer the same questions about `at`, a run of S slots of each of the R = B * H rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention.tokens import DenseTokens
from kv_attention.vectors import Vectors, read
from kv_policy import Codec, PagedTokens

_FAR: Final = 2**30  # a position that no query has
ROOM = 1 << 19  # numbers in a temporary tensor: 2 MiB in float32


@dataclass(frozen=True)
class PagedPart:
    """The tokens of one tier. All of them come before the queries."""

    pages: PagedTokens
    shortest: int  # all slots before that hold a token
    width: int
    dtype: torch.dtype  # to compute in
    positions: Int[Tensor, "B H _"] | None = None
    before: ClassVar[int] = 1  # so far at least does a token lie before a query that sees it

    @classmethod
    def of(
        cls, pages: PagedTokens, dtype: torch.dtype, positions: Int[Tensor, "B H _"] | None
    ) -> "PagedPart":
        """Look up how long the table rows are, where the host does not know it."""
        if pages.longest is not None:
            return cls(pages, 0, pages.longest, dtype, positions)
        shortest, longest = (int(x) for x in pages.length.aminmax())
        return cls(pages, 0 if pages.holes else shortest, longest, dtype, positions)

    def spans(self, size: int) -> Iterator[slice]:
        """All slots, in runs of whole pages."""
        tokens = self.pages.layout.tokens
        step = max(1, size // tokens) * tokens
        return (slice(start, min(start + step, self.width)) for start in range(0, self.width, step))

    def keys(self, at: slice) -> Vectors:
        """The keys there."""
        return self._read(at, self.pages.layout.format.key, first=0)

    def values(self, at: slice) -> Vectors:
        """The values there; zero where no token is."""
        form = self.pages.layout.format
        values = self._read(at, form.value, first=len(form.key.parts))
        held = self._held(at)
        return values if held is None else values.only(held.flatten(0, 1))

    def position(self, at: slice) -> Int[Tensor, "B H S"]:
        """The positions of the tokens there, which the caller has to have given."""
        if self.positions is None:
            raise ValueError("positions of stored tokens were not given")
        return self.positions[..., at]

    def visible(self, at: slice, position: Int[Tensor, "B L"]) -> Bool[Tensor, "B H 1 S"] | None:
        """Which slots hold a token; None: all of them."""
        held = self._held(at)
        return None if held is None else held[:, :, None]

    def _held(self, at: slice) -> Bool[Tensor, "B H S"] | None:
        if at.stop <= self.shortest:
            return None
        length = self.pages.length
        held = torch.arange(at.start, at.stop, device=length.device) < length[..., None]
        return held & (self._stored_position(at) >= 0) if self.pages.holes else held

    def _stored_position(self, at: slice) -> Int[Tensor, "B H S"]:
        layout = self.pages.layout
        start, size = layout.position_offset, 4 * layout.tokens
        rows = self.pages.data[:, start : start + size].index_select(0, self._pages(at))
        found = rows.view(torch.int32).view(*self.pages.table.shape[:2], -1)
        return found[..., : at.stop - at.start]

    def _read(self, at: slice, codec: Codec, first: int) -> Vectors:
        layout, table = self.pages.layout, self.pages.table
        pages = self._pages(at)
        parts = [
            self.pages.data[:, offset : offset + rows * size].index_select(0, pages)
            for offset, rows, size in layout.segments[first : first + len(codec.parts)]
        ]
        table_rows = table.shape[0] * table.shape[1]
        return read(parts, codec, table_rows, self.dtype).head(at.stop - at.start)

    def _pages(self, at: slice) -> Int[Tensor, " n"]:
        tokens, table = self.pages.layout.tokens, self.pages.table
        first, last = at.start // tokens, -(-at.stop // tokens)
        if self.pages.reverse:
            pages = table[..., table.shape[2] - last : table.shape[2] - first].flip(-1)
        else:
            pages = table[..., first:last]
        if at.stop > self.shortest:  # what lies past a table row's last page is not its page number
            column = torch.arange(first, last, device=table.device)
            pages = pages.where(column * tokens < self.pages.length[..., None], 0)
        return pages.reshape(-1)


@dataclass(frozen=True)
class DensePart:
    """Tokens in plain tensors, each with a position."""

    tokens: DenseTokens
    full: bool  # every place holds a token
    dtype: torch.dtype  # to compute in
    before: ClassVar[int] = 0

    @classmethod
    def of(cls, tokens: DenseTokens, dtype: torch.dtype) -> "DensePart":
        """Look up whether places are empty, where nobody says it."""
        full = tokens.full
        return cls(tokens, bool((tokens.position >= 0).all()) if full is None else full, dtype)

    @property
    def width(self) -> int:
        """Places in the tensors."""
        return self.tokens.position.shape[1]

    def spans(self, size: int) -> Iterator[slice]:
        """All places, in runs of `size`."""
        return (slice(start, min(start + size, self.width)) for start in range(0, self.width, size))

    def keys(self, at: slice) -> Vectors:
        """The keys there."""
        return Vectors(self._rows(self.tokens.key, at))

    def values(self, at: slice) -> Vectors:
        """The values there; zero where no token is."""
        values = Vectors(self._rows(self.tokens.value, at))
        if self.full:
            return values
        held = self.tokens.position[:, None, at] >= 0
        return values.only(held.expand(-1, self.tokens.value.shape[1], -1).flatten(0, 1))

    def position(self, at: slice) -> Int[Tensor, "B 1 S"]:
        """The positions of the tokens there."""
        return self.tokens.position[:, None, at]

    def visible(self, at: slice, position: Int[Tensor, "B L"]) -> Bool[Tensor, "B 1 L S"]:
        """The tokens that do not come after a query."""
        stored = self.tokens.position[:, None, None, at]
        return (stored >= 0) & (stored <= position[:, None, :, None])

    def _rows(self, x: Float[Tensor, "B H S D"], at: slice) -> Float[Tensor, "R n D"]:
        return x[:, :, at].to(self.dtype).flatten(0, 1)


AttentionPart: TypeAlias = PagedPart | DensePart


def block_sizes(q: Float[Tensor, "B H G L D"], value_dim: int) -> tuple[int, int]:
    """Queries and tokens to take at a time, so that no temporary is much larger than ROOM."""
    sequences, heads, group, length, dim = q.shape
    table_rows = sequences * heads
    rows = group * min(length, 64)  # enough to pay for reading a block of tokens
    tokens = max(1, ROOM // (table_rows * max(rows, dim, value_dim)))
    queries = max(1, ROOM // (table_rows * group * tokens))
    return queries, tokens


def reach(
    position: Int[Tensor, "B L"], part: AttentionPart, spans: Sequence[slice], skip: int
) -> list[list[int]]:
    """For each run of tokens the first query that may count, and the first from which all do.

    Before the one no query counts for any of the tokens, and from the other on all for all. Of a
    single query, or for stored tokens, the host does not ask.
    """
    if isinstance(part, PagedPart) or position.shape[1] == 1:
        return [[0, position.shape[1]]] * len(spans)
    place = part.tokens.position
    empty = place < 0
    first = [place.masked_fill(empty, _FAR)[:, at].amin() for at in spans]
    last = [place.masked_fill(empty, _FAR)[:, at].amax() + skip for at in spans]
    latest = position.amax(dim=0).cummax(dim=0).values  # of the queries up to here
    earliest = position.amin(dim=0).flip(0).cummin(dim=0).values.flip(0)  # of those from here on
    start = torch.searchsorted(latest, torch.stack(first).to(latest.dtype))
    settled = torch.searchsorted(earliest, torch.stack(last).to(earliest.dtype))
    found: list[list[int]] = torch.stack((start, settled), dim=1).tolist()
    return found
