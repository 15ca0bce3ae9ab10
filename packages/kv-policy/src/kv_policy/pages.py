"""Page layouts: the input of attention kernels, equal pages of bytes and their offsets."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from jaxtyping import Int, UInt8
from torch import Tensor

from kv_policy.codec import TokenFormat
from kv_policy.key_codes import code_bytes

ALIGNED: Final = 16  # bytes: bounds in pages begin at a multiple, and so do the pages
BOUND: Final = 2  # bytes of a bound of a channel


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How a page of `nbytes` bytes holds `tokens` tokens of one head in one format.

    A page is a sequence of segments, one per part of the format (key codes, key metadata, value
    codes, value metadata for an integer format), each `tokens / block` rows of that part; then,
    where the policy needs them, a float32 score and an int32 position per token. This is the
    unified page of LeanKV section 5.2. A page may end with bounds of its keys, two bfloat16 numbers
    per channel, or with codes of them, for policies that read by them. Bytes after the last segment
    are unused.

    Attributes:
        format: How a token is stored.
        tokens: Tokens in a page.
        nbytes: Bytes of a page.
        scores: Whether each token has a score.
        positions: Whether each token has its position.
        bounds: Whether a page has bounds of its keys: the largest number of each channel, then the
            smallest.
        coded: Whether it has codes of its keys (`kv_policy.key_codes`) in their place; only with
            `bounds`.
        rows: Blocks in a page.
        segments: (offset, rows, bytes per row) of each part of the format, in order.
        score_offset: Byte where the float32 scores start; meaningful where `scores` is set.
        position_offset: Byte where the int32 positions start; meaningful where `positions` is set.
        bound_offset: Byte where the bounds start, a multiple of 16; meaningful where `bounds` is
            set.
        used: Bytes of the page in use.
    """

    format: TokenFormat
    tokens: int
    nbytes: int
    scores: bool = False
    positions: bool = False
    bounds: bool = False
    coded: bool = False
    rows: int = field(init=False, repr=False, compare=False)
    segments: tuple[tuple[int, int, int], ...] = field(init=False, repr=False, compare=False)
    score_offset: int = field(init=False, repr=False, compare=False)
    position_offset: int = field(init=False, repr=False, compare=False)
    bound_offset: int = field(init=False, repr=False, compare=False)
    used: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the tokens fit the page and fill whole blocks."""
        if self.tokens < 1 or self.tokens % self.format.block:
            raise ValueError(
                f"a page of {self.nbytes} bytes would hold {self.tokens} tokens; it must hold at "
                f"least one block of {self.format.block} and only whole blocks"
            )
        self._lay_out()
        if self.used > self.nbytes:
            raise ValueError(
                f"{self.tokens} tokens take {self.used} bytes and the page has {self.nbytes}"
            )
        if self.coded and not self.bounds:
            raise ValueError("codes of keys are in the place of bounds; give bounds=True, too")
        if self.bounds and self.nbytes % ALIGNED:
            raise ValueError(
                f"a page of {self.nbytes} bytes is to have bounds of its keys; it must have a "
                f"multiple of {ALIGNED} bytes"
            )

    @classmethod
    def sized(
        cls,
        format: TokenFormat,
        tokens: int,
        scores: bool = False,
        positions: bool = False,
        bounds: bool = False,
        coded: bool = False,
    ) -> "PageLayout":
        """Lay out a page that holds exactly `tokens` tokens, without padding but that of bounds."""
        nbytes = tokens // format.block * format.nbytes + 4 * tokens * (scores + positions)
        if bounds:
            nbytes = _aligned(_aligned(nbytes) + bound_bytes(format.key.dim, tokens, coded))
        return cls(format, tokens, nbytes, scores, positions, bounds, coded)

    @classmethod
    def fitted(
        cls, format: TokenFormat, nbytes: int, scores: bool = False, positions: bool = False
    ) -> "PageLayout":
        """Lay out as many whole blocks as fit into `nbytes` bytes.

        Raises:
            ValueError: not even one block fits.
        """
        block = format.nbytes + 4 * format.block * (scores + positions)
        return cls(format, nbytes // block * format.block, nbytes, scores, positions)

    @property
    def bound_bytes(self) -> int:
        """Bytes of the bounds in a page, or of the codes of its keys."""
        return bound_bytes(self.format.key.dim, self.tokens, self.coded) if self.bounds else 0

    @property
    def token_bytes(self) -> float:
        """Bytes per token, score and position included, page rounding and bounds excluded."""
        return self.format.nbytes / self.format.block + 4 * (self.scores + self.positions)

    def _lay_out(self) -> None:
        """Compute, once, the offsets that are read at every step of every layer."""
        rows, parts = self.tokens // self.format.block, self.format.parts
        offsets = [0, *accumulate(rows * part for part in parts)]
        segments = ((offset, rows, part) for offset, part in zip(offsets, parts, strict=False))
        positions = offsets[-1] + 4 * self.tokens * self.scores
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "segments", tuple(segments))
        object.__setattr__(self, "score_offset", offsets[-1])
        object.__setattr__(self, "position_offset", positions)
        end = positions + 4 * self.tokens * self.positions
        object.__setattr__(self, "bound_offset", _aligned(end))
        used = _aligned(end) + self.bound_bytes if self.bounds else end
        object.__setattr__(self, "used", used)


def bound_bytes(dim: int, tokens: int, coded: bool) -> int:
    """Return the bytes of the bounds of a page, or of the codes of its keys, which have `dim`."""
    return code_bytes(dim, tokens) if coded else 2 * BOUND * dim


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class TileCounts:
    """The tiles of the table rows of several layers, which one layer counts for all of them.

    Kernels divide the tokens of a table row into tiles. The first layer of a step counts those of
    every layer, and the others read. Whoever changes a length begins with a new `counted`.

    Attributes:
        length: Tokens of each table row of all layers, int32; contiguous, as kernels read it so.
        layer: The index of this layer.
        counted: By tokens of a tile: the tiles in table rows 0 to r of each layer.
    """

    length: Int[Tensor, "N R"]
    layer: int = 0
    counted: dict[int, Int[Tensor, "N R"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Copy lengths that are one number expanded over rows."""
        object.__setattr__(self, "length", self.length.contiguous())


@dataclass(frozen=True, slots=True)
class PagedTokens:
    """One tier of one layer in a pool of equal pages; each (sequence, head) is a page-table row.

    Token i of row (b, h) is slot i % tokens of its page i // tokens. Page j is table[b, h, j], or
    table[b, h, T - 1 - j] for the tier that grows from the right of a shared table (`reverse`; the
    bidirectional table of LeanKV section 5.2). Table entries past the pages of a row are undefined
    and must not be read.
    """

    data: UInt8[Tensor, "P nbytes"]
    table: Int[Tensor, "B H T"]
    length: Int[Tensor, "B H"]
    layout: PageLayout
    reverse: bool = False
    holes: bool = False  # a slot below `length` with a negative stored position is empty
    longest: int | None = None  # upper bound of `length`, known on the host without a sync
    tiles: TileCounts | None = field(default=None, compare=False, repr=False)
