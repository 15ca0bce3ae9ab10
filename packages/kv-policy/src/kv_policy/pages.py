"""What a pager hands to attention: equal pages of bytes, and what is where inside them."""

from dataclasses import dataclass

from jaxtyping import Int, UInt8
from torch import Tensor

from kv_policy.codec import TokenFormat


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How a page of `nbytes` bytes holds `tokens` tokens of one head in one format.

    A page is a run of segments, one per part of the format (key codes, key metadata, value codes,
    value metadata for an integer format), each `tokens / block` rows of that part's bytes; then,
    where the policy needs them, a float32 score and an int32 position per token. This is the
    unified page of LeanKV section 5.2. Bytes after the last segment are unused.
    """

    format: TokenFormat
    tokens: int
    nbytes: int
    scores: bool = False
    positions: bool = False

    def __post_init__(self) -> None:
        """Check that the tokens fit the page and fill whole blocks."""
        if self.tokens < 1 or self.tokens % self.format.block:
            raise ValueError(
                f"a page of {self.nbytes} bytes would hold {self.tokens} tokens; it must hold at "
                f"least one block of {self.format.block} and only whole blocks"
            )
        if self.used > self.nbytes:
            raise ValueError(
                f"{self.tokens} tokens take {self.used} bytes and the page has {self.nbytes}"
            )

    @classmethod
    def sized(
        cls, format: TokenFormat, tokens: int, scores: bool = False, positions: bool = False
    ) -> "PageLayout":
        """Lay out a page that holds exactly `tokens` tokens and wastes no byte."""
        nbytes = tokens // format.block * format.nbytes + 4 * tokens * (scores + positions)
        return cls(format, tokens, nbytes, scores, positions)

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
    def token_bytes(self) -> float:
        """Bytes a token takes here, score and position included, page rounding excluded."""
        return self.format.nbytes / self.format.block + 4 * (self.scores + self.positions)

    @property
    def rows(self) -> int:
        """Blocks in a page."""
        return self.tokens // self.format.block

    @property
    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """(offset, rows, bytes per row) of each part of the format, in order."""
        found, offset = [], 0
        for part in self.format.parts:
            found.append((offset, self.rows, part))
            offset += self.rows * part
        return tuple(found)

    @property
    def score_offset(self) -> int:
        """Byte where the float32 scores start; meaningful where `scores` is set."""
        return self.rows * self.format.nbytes

    @property
    def position_offset(self) -> int:
        """Byte where the int32 positions start; meaningful where `positions` is set."""
        return self.score_offset + 4 * self.tokens * self.scores

    @property
    def used(self) -> int:
        """Bytes of the page that hold something."""
        return self.position_offset + 4 * self.tokens * self.positions


@dataclass(frozen=True, slots=True)
class PagedTokens:
    """One tier of one layer inside a pool of equal pages; each (sequence, head) is a stream.

    Token i of stream (b, h) is slot i % tokens of its page i // tokens. Page j is table[b, h, j],
    or table[b, h, T - 1 - j] where the tier is the one that grows from the right of a table it
    shares (`reverse`; the bidirectional table of LeanKV section 5.2). Entries that belong to no
    page of the stream mean nothing and must not be read.
    """

    data: UInt8[Tensor, "P nbytes"]
    table: Int[Tensor, "B H T"]
    length: Int[Tensor, "B H"]
    layout: PageLayout
    reverse: bool = False
    holes: bool = False  # a slot below `length` whose stored position is negative holds no token
    longest: int | None = None  # no stream is longer: known on the host, so nobody need ask
