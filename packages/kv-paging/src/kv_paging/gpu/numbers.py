"""A page layout as nested tuples of numbers, the compile-time constants of kernels."""

from collections.abc import Iterator
from math import gcd
from typing import Final, TypeAlias

from torch import Tensor

from kv_policy import PagedTokens, PageLayout
from kv_policy.described import NUMBERS, described

# (kind, dim, bits, group, byte offset of codes or numbers, byte offset of scales and zero points)
Half: TypeAlias = tuple[int, int, int, int, int, int]
# (tokens, offset of scores or -1, of positions or -1, reverse, alignment of pages, keys, values)
Layout: TypeAlias = tuple[int, int, int, int, int, Half, Half]

# Elements of a tile, such that the registers of a program of four warps fit several tiles.
_TILE: Final = 2048
_MOST_ROWS: Final = 16
_OF_A_STEP: Final = 2  # the divisor of a step's tiles: it has few rows for many programs


def numbers(layout: PageLayout, reverse: bool, alignment: int) -> Layout:
    """Return the layout as numbers; it must be `described`."""
    known = described(layout)
    tokens, *offsets = known.places
    kind, dim, bits, group = known.formats[:4]
    key = (kind, dim, bits, group, *offsets[:2])
    kind, dim, bits, group = known.formats[4:]
    value = (kind, dim, bits, group, *offsets[2:])
    score = layout.score_offset if layout.scores else -1
    position = known.positions if layout.positions else -1
    return tokens, score, position, int(reverse), alignment, _half(key), _half(value)


def numbers_of(pages: PagedTokens) -> Layout:
    """Return the layout of a tier as numbers, with the alignment of its pages."""
    return numbers(pages.layout, pages.reverse, alignment(pages.data))


def alignment(data: Tensor) -> int:
    """Return the alignment of all pages in bytes, 16 at most."""
    return gcd(16, data.data_ptr(), data.stride(0))


def rows(*layouts: Layout) -> int:
    """Return the tokens per program."""
    return max(1, min(_MOST_ROWS, _TILE // max(_tiles(layouts))))


def table_rows(*layouts: Layout) -> int:
    """Return the table rows per program of a step."""
    return max(1, rows(*layouts) // _OF_A_STEP)


def knows(*vectors: Tensor) -> bool:
    """Whether kernels support vectors of these dtypes."""
    return all(x.dtype in NUMBERS for x in vectors)


def blocks(count: int, size: int) -> int:
    """Return the number of blocks of a size."""
    return -(-count // size)


def _half(some: tuple[int, ...]) -> Half:
    kind, dim, bits, group, first, second = some
    return kind, dim, bits, group, first, second


def _tiles(layouts: tuple[Layout, ...]) -> Iterator[int]:
    """Yield the elements of each vector's tile."""
    for layout in layouts:
        for half in layout[5:]:
            assert isinstance(half, tuple)
            kind, dim, bits, *_ = half
            lanes = -(-dim * bits // 8) if kind == 0 else dim
            yield (8 // bits if kind == 0 else 1) * (1 << (lanes - 1).bit_length())
