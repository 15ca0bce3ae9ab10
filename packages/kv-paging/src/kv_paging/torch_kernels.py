"""The page kernels in torch, for any device and codec: the reference of the other kernels."""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from jaxtyping import BFloat16, Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging.bounding import bound_decoded
from kv_paging.moves import (
    Segment,
    copy_pages,
    move,
    position_segment,
    score_segment,
    take,
    take_pages,
)
from kv_paging.pool import PagePool
from kv_paging.step import carry_out
from kv_paging.table import PageTable, pages_for
from kv_paging.tokens import (
    BOTH,
    NONE,
    Stored,
    VectorNames,
    read_positions,
    read_scores,
    read_tokens,
    write_scores,
    write_tokens,
)
from kv_paging.work import DecodeStep, Recoding, TokenWrite
from kv_policy import PagedTokens, PageLayout, Running

__all__ = [
    "accumulate",
    "bound",
    "compact",
    "copy_pages",
    "place",
    "read",
    "recode",
    "rescore",
    "step",
    "weakest",
    "write",
]

_ROWS: Final = 1 << 14  # tokens encoded at a time, to bound the codec's temporary memory


def write(pages: PagedTokens, tokens: TokenWrite) -> None:
    """Encode tokens and write them; synchronizes with the device to list the kept ones."""
    table_rows, score, position = tokens.table_rows, tokens.score, tokens.position
    block, columns = pages.layout.format.block, tokens.keep.shape[1]
    slot = tokens.start[:, None] + tokens.keep.cumsum(1) - 1
    # Encode a token of each row before writing any, so that nothing is replaced if a codec raises.
    rows = max(max(_ROWS, len(table_rows)) // block, 1) * block
    for kept in torch.split(tokens.keep.flatten().nonzero()[:, 0], rows):
        place = (kept // columns, kept % columns)
        write_tokens(
            pages.data,
            pages.layout,
            *_place(pages, table_rows[place[0]], slot[place]),
            tokens.key[place],
            tokens.value[place],
            None if score is None else score[place],
            None if position is None else position[place],
        )


def recode(pages: PagedTokens, tokens: Recoding) -> None:
    """Decode stored tokens to tensors, and write these."""
    write(pages, decoded(tokens, pages.layout, read))


def decoded(tokens: Recoding, layout: PageLayout, reader: Callable[..., Stored]) -> TokenWrite:
    """Return stored tokens as tensors, read by some kernels, with what a layout stores of them."""
    found = reader(tokens.source, tokens.source_rows, tokens.keep.shape[1], BOTH)
    assert found.key is not None  # both were requested
    assert found.value is not None
    return TokenWrite(
        tokens.table_rows,
        tokens.start,
        tokens.keep,
        found.key,
        found.value,
        found.score if layout.scores else None,
        found.position if layout.positions else None,
    )


def place(
    data: UInt8[Tensor, "P nbytes"],
    layout: PageLayout,
    page: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    key: Float[Tensor, "m H D"],
    value: Float[Tensor, "m H Dv"],
) -> None:
    """Encode tokens and write each to its row of its page."""
    key, value = (x[: len(page) // x.shape[1]].flatten(0, 1) for x in (key, value))
    write_tokens(data, layout, page, row, key, value, None, None)


def compact(pages: PagedTokens, table_rows: Int[Tensor, " S"], stay: Bool[Tensor, "S R"]) -> None:
    """Move kept blocks to the front; synchronizes with the device twice."""
    block = pages.layout.format.block
    inside = before(stay.sum(1), stay.shape[1])
    # A table row has as many kept blocks past its new end as gaps before it, so the two lists, both
    # in the order of table rows, match element by element.
    source, target = (stay & ~inside).nonzero(), (~stay & inside).nonzero()
    places = []
    for listed in (source, target):
        page, row = _place(pages, table_rows[listed[:, 0]], listed[:, 1] * block)
        places.append((page, row // block))
    move(pages.data, pages.layout, *places)


def read(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    slots: int,
    vectors: VectorNames,
    start: Int[Tensor, " S"] | None = None,
) -> Stored:
    """Read tokens."""
    if start is not None:
        return _read_from(pages, table_rows, start, slots, vectors)
    take_all = _taker(pages, table_rows, slots)
    held = _present(pages, table_rows, slots, take_all)
    return read_tokens(pages.layout, held, take_all, vectors)


def _read_from(
    pages: PagedTokens, table_rows: Tensor, start: Tensor, slots: int, vectors: VectorNames
) -> Stored:
    slot = start[:, None] + torch.arange(slots, device=start.device)
    held = slot < _lengths(pages, table_rows)[:, None]
    page, row = _place(pages, table_rows[:, None].expand_as(slot), slot)
    return read_tokens(
        pages.layout, held, lambda segment: take(pages.data, segment, page, row), vectors
    )


def rescore(pages: PagedTokens, table_rows: Int[Tensor, " S"], score: Float[Tensor, "S L"]) -> None:
    """Write scores; those past a table row's last page are redirected to the scratch page."""
    segment = score_segment(pages.layout)
    assert segment is not None  # checked by the caller
    tokens = pages.layout.tokens
    columns = pages_for(score.shape[1], tokens)
    padded = score.new_zeros(len(score), columns * tokens)
    padded[:, : score.shape[1]] = score
    if pages.holes:
        padded = padded.masked_fill(~present(pages, table_rows, padded.shape[1]), torch.inf)
    page = PageTable.over(pages).block(table_rows, columns)
    held = before(pages_for(_lengths(pages, table_rows), tokens), page.shape[1])
    page = page.where(held, len(pages.data) - 1)
    by_page = padded.view(-1, tokens)
    write_scores(pages.data, segment, page.flatten(), by_page)


def accumulate(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    before: Int[Tensor, " S"],
    mass: Float[Tensor, "S L"],
    seen: Int[Tensor, "S L"],
    running: Running,
    position: Int[Tensor, "S L"] | None = None,
) -> None:
    """Update scores."""
    held = read(pages, table_rows, mass.shape[1], NONE)
    place = held.position if position is None else position
    assert held.score is not None  # checked by the caller
    assert place is not None
    score = running.update(held.score, place, before[:, None], mass, seen)
    rescore(pages, table_rows, score.where(before[:, None] >= 0, held.score))


def weakest(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    slots: int,
    until: Int[Tensor, " S"] | None,
) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
    """Find the lowest scores, without synchronizing."""
    scores, positions = score_segment(pages.layout), position_segment(pages.layout)
    assert scores is not None  # checked by the caller
    # At least one slot, as argmin needs one even if all table rows are empty.
    take_all = _taker(pages, table_rows, max(slots, 1))
    score = read_scores(take_all(scores))
    held = _present(pages, table_rows, score.shape[1], take_all)
    if until is not None and positions is not None:
        held = held & (read_positions(take_all(positions)) < until[:, None])
    score = score.masked_fill(~held, torch.inf)
    slot = score.argmin(1)
    # If all held scores are inf, the first inf may be in an empty slot.
    slot = slot.where(held.gather(1, slot[:, None])[:, 0], held.int().argmax(1))
    return score.gather(1, slot[:, None])[:, 0], slot.where(held.any(1), -1)


def bound(
    pages: PagedTokens,
    count: Int[Tensor, " S"],
    both: BFloat16[Tensor, "*T _"] | UInt8[Tensor, "*T _"],
    most: int,
) -> None:
    """Bound keys, or encode them; synchronizes with the device to list the pages."""
    bound_decoded(read, pages, count, both)


def step(pool: PagePool, works: Sequence[DecodeStep]) -> None:
    """Apply a step, without synchronizing."""
    carry_out(pool, works)


def present(
    pages: PagedTokens, table_rows: Int[Tensor, " S"], slots: int
) -> Bool[Tensor, "S slots"]:
    """Mark the slots that hold a token."""
    return _present(pages, table_rows, slots, _taker(pages, table_rows, slots))


def before(end: Int[Tensor, " S"], slots: int) -> Bool[Tensor, "S slots"]:
    """Mark the slots before each end."""
    return torch.arange(slots, device=end.device) < end[:, None]


def _present(
    pages: PagedTokens, table_rows: Tensor, slots: int, take_all: Callable[[Segment], Tensor]
) -> Bool[Tensor, "S slots"]:
    here = before(_lengths(pages, table_rows), slots)
    positions = position_segment(pages.layout)
    if not pages.holes or positions is None:
        return here
    return here & (read_positions(take_all(positions))[:, :slots] >= 0)


def _taker(pages: PagedTokens, table_rows: Tensor, slots: int) -> Callable[[Segment], Tensor]:
    """Return a function that reads a segment of all pages with the first slots."""
    page = PageTable.over(pages).block(table_rows, pages_for(slots, pages.layout.tokens))
    return lambda segment: take_pages(pages.data, segment, page)


def _lengths(pages: PagedTokens, table_rows: Tensor) -> Int[Tensor, " S"]:
    return pages.length[:, 0][table_rows].long()


def _place(pages: PagedTokens, table_rows: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Return the page of a slot of each table row, and the row inside it."""
    size = pages.layout.tokens
    return PageTable.over(pages).lookup(table_rows, slot // size), slot % size
