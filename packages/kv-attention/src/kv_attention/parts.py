"""The tokens of an attention pass, read block by block: paged parts and dense parts.

Both have the same methods, for a range `at` of S slots of each of the R = B * H table rows.
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

_FAR: Final = 2**30  # a position after every query
ROOM = 1 << 19  # elements of a temporary tensor on a CPU: 2 MiB in float32
_SHARE: Final = 512  # of the memory of a GPU, for a temporary: 160 MiB of 80 GiB


@dataclass(frozen=True)
class PagedPart:
    """The tokens of one tier. All of them precede the queries."""

    pages: PagedTokens
    shortest: int  # all slots before this one hold a token
    width: int
    dtype: torch.dtype  # compute dtype
    positions: Int[Tensor, "B H _"] | None = None
    before: ClassVar[int] = 1  # minimum distance of a token to a query that sees it

    @classmethod
    def of(
        cls, pages: PagedTokens, dtype: torch.dtype, positions: Int[Tensor, "B H _"] | None
    ) -> "PagedPart":
        """Create the part; read the table rows' lengths if the host does not know them."""
        if pages.longest is not None:
            return cls(pages, 0, pages.longest, dtype, positions)
        shortest, longest = (int(x) for x in pages.length.aminmax())
        return cls(pages, 0 if pages.holes else shortest, longest, dtype, positions)

    def spans(self, size: int) -> Iterator[slice]:
        """Yield all slots, in ranges of whole pages."""
        tokens = self.pages.layout.tokens
        step = max(1, size // tokens) * tokens
        return (slice(start, min(start + step, self.width)) for start in range(0, self.width, step))

    def keys(self, at: slice) -> Vectors:
        """Return the keys of these slots."""
        return self._read(at, self.pages.layout.format.key, first=0)

    def both(self, at: slice) -> tuple[Vectors, Vectors]:
        """Return the keys and the values of these slots; values are zero in empty slots."""
        form, keys = self.pages.layout.format, self.keys(at)
        if form.value_in_key:
            values = keys.first(form.value.dim)
        else:
            values = self._read(at, form.value, first=len(form.key.parts))
        held = self._held(at)
        return keys, values if held is None else values.only(held.flatten(0, 1))

    def position(self, at: slice) -> Int[Tensor, "B H S"]:
        """Return the positions of the tokens of these slots, which the caller must have given."""
        if self.positions is None:
            raise ValueError("positions of stored tokens were not given")
        return self.positions[..., at]

    def visible(self, at: slice, position: Int[Tensor, "B L"]) -> Bool[Tensor, "B H 1 S"] | None:
        """Return the mask of slots that hold a token; None: all of them."""
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
        if at.stop > self.shortest:  # entries past a table row's last page are no page numbers
            column = torch.arange(first, last, device=table.device)
            pages = pages.where(column * tokens < self.pages.length[..., None], 0)
        return pages.reshape(-1)


@dataclass(frozen=True)
class DensePart:
    """Tokens in dense tensors, each with a position."""

    tokens: DenseTokens
    full: bool  # every slot holds a token
    dtype: torch.dtype  # compute dtype
    before: ClassVar[int] = 0

    @classmethod
    def of(cls, tokens: DenseTokens, dtype: torch.dtype) -> "DensePart":
        """Create the part; check for empty slots if `full` is None."""
        full = tokens.full
        return cls(tokens, bool((tokens.position >= 0).all()) if full is None else full, dtype)

    @property
    def width(self) -> int:
        """Number of slots in the tensors."""
        return self.tokens.position.shape[1]

    def spans(self, size: int) -> Iterator[slice]:
        """Yield all slots, in ranges of `size`."""
        return (slice(start, min(start + size, self.width)) for start in range(0, self.width, size))

    def keys(self, at: slice) -> Vectors:
        """Return the keys of these slots."""
        return Vectors(self._rows(self.tokens.key, at))

    def both(self, at: slice) -> tuple[Vectors, Vectors]:
        """Return the keys and the values of these slots; values are zero in empty slots."""
        keys, values = self.keys(at), Vectors(self._rows(self.tokens.value, at))
        if self.full:
            return keys, values
        held = self.tokens.position[:, None, at] >= 0
        spread = held.expand(-1, self.tokens.value.shape[1], -1).flatten(0, 1)
        return keys, values.only(spread)

    def position(self, at: slice) -> Int[Tensor, "B 1 S"]:
        """Return the positions of the tokens of these slots."""
        return self.tokens.position[:, None, at]

    def visible(self, at: slice, position: Int[Tensor, "B L"]) -> Bool[Tensor, "B 1 L S"]:
        """Return the mask of the tokens at or before each query."""
        stored = self.tokens.position[:, None, None, at]
        return (stored >= 0) & (stored <= position[:, None, :, None])

    def _rows(self, x: Float[Tensor, "B H S D"], at: slice) -> Float[Tensor, "R n D"]:
        return x[:, :, at].to(self.dtype).flatten(0, 1)


AttentionPart: TypeAlias = PagedPart | DensePart


def room(device: torch.device) -> int:
    """Return the elements of a temporary tensor: in a CPU's cache, or a share of a GPU's memory.

    A GPU takes few large blocks, because each launches the same kernels.
    """
    if device.type != "cuda":
        return ROOM
    return max(ROOM, torch.cuda.get_device_properties(device).total_memory // _SHARE // 4)


def block_sizes(q: Float[Tensor, "B H G L D"], value_dim: int) -> tuple[int, int]:
    """Return the queries and tokens per block, so that temporaries have about `room` elements."""
    sequences, heads, group, length, dim = q.shape
    table_rows, most = sequences * heads, room(q.device)
    rows = group * min(length, 64)  # enough to amortize the read of a block of tokens
    tokens = max(1, most // (table_rows * max(rows, dim, value_dim)))
    queries = max(1, most // (table_rows * group * tokens))
    return queries, tokens


def reach(
    position: Int[Tensor, "B L"], part: AttentionPart, spans: Sequence[slice], skip: int
) -> list[list[int]]:
    """Return, per range of tokens, the first query that may count and the first from which all do.

    Before the former no query counts for any of the tokens, and from the latter on all count for
    all. For a single query, or stored tokens, this does not synchronize with the device.
    """
    if isinstance(part, PagedPart) or position.shape[1] == 1:
        return [[0, position.shape[1]]] * len(spans)
    place = part.tokens.position
    empty = place < 0
    first = [place.masked_fill(empty, _FAR)[:, at].amin() for at in spans]
    last = [place.masked_fill(empty, _FAR)[:, at].amax() + skip for at in spans]
    latest = position.amax(dim=0).cummax(dim=0).values  # of the queries so far
    earliest = position.amin(dim=0).flip(0).cummin(dim=0).values.flip(0)  # of this query and after
    start = torch.searchsorted(latest, torch.stack(first).to(latest.dtype))
    settled = torch.searchsorted(earliest, torch.stack(last).to(earliest.dtype))
    found: list[list[int]] = torch.stack((start, settled), dim=1).tolist()
    return found
