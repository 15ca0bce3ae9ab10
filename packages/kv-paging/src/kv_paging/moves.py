"""Rows of bytes between pages and tensors: all torch reads and writes of page data.

A page is a sequence of segments of equal rows; scores and positions are segments like the others,
with rows of 4 bytes. This module neither interprets the bytes nor assumes that a segment is
aligned.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from kv_policy import PageLayout

# Wider units move fewer elements; 8 bytes is the widest that any machine copies at once.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_BYTES = 1 << 24  # copied at a time while rows or pages move


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` rows of `width` bytes each, from byte `offset` of a page."""

    offset: int
    rows: int
    width: int


def format_segments(layout: PageLayout) -> tuple[Segment, ...]:
    """Return a segment for each part of the format, in order."""
    return tuple(Segment(*segment) for segment in layout.segments)


def score_segment(layout: PageLayout) -> Segment | None:
    """Return the segment of the float32 scores, if pages store them."""
    return Segment(layout.score_offset, layout.tokens, 4) if layout.scores else None


def position_segment(layout: PageLayout) -> Segment | None:
    """Return the segment of the int32 positions, if pages store them."""
    return Segment(layout.position_offset, layout.tokens, 4) if layout.positions else None


def block_segments(layout: PageLayout) -> tuple[Segment, ...]:
    """Return all segments with one row per block: a block moves with its scores and positions."""
    beside = (score_segment(layout), position_segment(layout))
    width = 4 * layout.format.block
    return (
        *format_segments(layout),
        *(Segment(each.offset, layout.rows, width) for each in beside if each is not None),
    )


def put(
    data: UInt8[Tensor, "P nbytes"],
    segment: Segment,
    page: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    source: UInt8[Tensor, "n width"],
) -> None:
    """Write row i of `source` to row `row[i]` of page `page[i]`; the targets must differ."""
    if page.numel() == 0:
        return
    unit = _unit(data, segment)
    # A single row of a wider tensor reports itself as contiguous at any offset: copy it.
    rows = source.clone(memory_format=torch.contiguous_format)
    _rows(data, segment, unit)[page, row] = rows.view(_UNITS[unit])


def take(
    data: UInt8[Tensor, "P nbytes"],
    segment: Segment,
    page: Int[Tensor, "*S"],
    row: Int[Tensor, "*S"],
) -> UInt8[Tensor, "*S width"]:
    """Read row `row[i]` of page `page[i]`; zeros if there are no pages."""
    if len(data) == 0 or page.numel() == 0:
        return data.new_zeros(*page.shape, segment.width)
    return _rows(data, segment, _unit(data, segment))[page, row].view(torch.uint8)


def put_pages(
    data: UInt8[Tensor, "P nbytes"],
    segment: Segment,
    page: Int[Tensor, " n"],
    source: UInt8[Tensor, "n rows width"],
) -> None:
    """Write all rows of whole pages."""
    if page.numel() == 0:
        return
    unit = _unit(data, segment)
    _rows(data, segment, unit)[page] = source.contiguous().view(_UNITS[unit])


def take_pages(
    data: UInt8[Tensor, "P nbytes"], segment: Segment, page: Int[Tensor, "S T"]
) -> UInt8[Tensor, "S slots width"]:
    """Read all rows of whole pages, concatenated per table row."""
    if len(data) == 0 or page.numel() == 0:
        return data.new_zeros(len(page), page.shape[1] * segment.rows, segment.width)
    rows = _rows(data, segment, _unit(data, segment))[page]
    return rows.view(torch.uint8).flatten(1, 2)


def move(
    data: UInt8[Tensor, "P nbytes"],
    layout: PageLayout,
    source: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
) -> None:
    """Copy blocks from (page, row) to (page, row), with their scores and positions, unchanged.

    No target may be the source of another copy. The copy is chunked to bound temporary memory.
    """
    segments = block_segments(layout)
    widest = max(segment.width for segment in segments)
    for piece in pieces(source[0].shape[0], widest):
        for segment in segments:
            rows = take(data, segment, source[0][piece], source[1][piece])
            put(data, segment, target[0][piece], target[1][piece], rows)


def copy_pages(
    data: UInt8[Tensor, "P nbytes"], source: Int[Tensor, " n"], target: Int[Tensor, " n"]
) -> None:
    """Copy whole pages, in chunks."""
    for piece in pieces(source.shape[0], data.shape[1]):
        data[target[piece]] = data[source[piece]]


def pieces(count: int, width: int) -> Iterator[slice]:
    """Yield slices of `count` rows of `width` bytes, which bound temporary memory."""
    step = max(1, _MOST_BYTES // max(width, 1))
    return (slice(start, start + step) for start in range(0, count, step))


def _unit(data: Tensor, segment: Segment) -> int:
    return gcd(8, data.storage_offset() + segment.offset, data.stride(0), segment.width)


def _rows(data: Tensor, segment: Segment, unit: int) -> Tensor:
    span = data[:, segment.offset : segment.offset + segment.rows * segment.width]
    return span.view(_UNITS[unit]).view(len(data), segment.rows, segment.width // unit)
