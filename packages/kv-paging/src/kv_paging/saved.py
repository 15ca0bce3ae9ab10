"""The table rows of a store without its pages: equal for every page size, pool and device."""

from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from kv_paging.blocks import BlockStore
from kv_paging.moves import (
    Segment,
    format_segments,
    pieces,
    position_segment,
    put,
    score_segment,
    take,
)
from kv_paging.store import TokenStore
from kv_paging.table import spread
from kv_policy import PageLayout


@dataclass(frozen=True, slots=True)
class SavedRows:
    """All S slots of a store, one after another: by layer, sequence, KV head and slot.

    The tensors may be of an untrusted file: `expect` compares them with what they should be.

    Attributes:
        length: slots in each table row, int32 of [N, B, H].
        parts: per part of the format, the bytes of each block of tokens, uint8 of [blocks, bytes].
        score: scores, float32 of [S], if pages store them.
        position: positions, int32 of [S], if pages store them; -1 marks a hole.
    """

    length: Tensor
    parts: tuple[Tensor, ...]
    score: Tensor | None
    position: Tensor | None

    @property
    def live(self) -> Int[Tensor, "N B H"]:
        """Tokens in each table row, excluding holes."""
        if self.position is None:
            return self.length.long()
        row = torch.repeat_interleave(self.length.flatten().long())
        live = self.length.new_zeros(self.length.numel(), dtype=torch.long)
        live.index_add_(0, row, (self.position >= 0).long())
        return live.view(self.length.shape)

    def expect(self, layout: PageLayout, lead: tuple[int, int, int]) -> None:
        """Raise unless the tensors have the sizes that lengths and layout imply.

        Args:
            layout: the page layout of the store.
            lead: layers, sequences and heads.

        Raises:
            ValueError: a dtype, a shape or a length is wrong.
        """
        _expect("length", self.length, torch.int32, lead)
        block = layout.format.block
        if bool((self.length < 0).any()) or bool((self.length % block).any()):
            raise ValueError(f"a length is negative, or not a multiple of {block} tokens")
        slots = int(self.length.sum())
        if len(self.parts) != len(layout.format.parts):
            raise ValueError(
                f"a token has {len(self.parts)} parts, but its format {len(layout.format.parts)}"
            )
        for part, width in zip(self.parts, layout.format.parts, strict=True):
            _expect("part", part, torch.uint8, (slots // block, width))
        for name, x, dtype, stored in (
            ("score", self.score, torch.float32, layout.scores),
            ("position", self.position, torch.int32, layout.positions),
        ):
            if (x is not None) != stored:
                raise ValueError(f"{name} is {'missing' if stored else 'not expected'}")
            if x is not None:
                _expect(name, x, dtype, (slots,))


def saved_rows(store: TokenStore) -> SavedRows:
    """Copy the slots of a store to the CPU; synchronizes with the device.

    The store's bound of lengths becomes exact, as that of what is restored.
    """
    store.settle_longest()
    layout, data = store.layout, store.pool.data
    block = layout.format.block

    def rows(segment: Segment, each: int) -> UInt8[Tensor, "_ _"]:
        page, row = _places(store, each)
        return take(data, segment, page, row).cpu()

    scores, positions = score_segment(layout), position_segment(layout)
    return SavedRows(
        store.length.to("cpu", copy=True),
        tuple(rows(segment, block) for segment in format_segments(layout)),
        None if scores is None else rows(scores, 1).view(torch.float32)[:, 0],
        None if positions is None else rows(positions, 1).view(torch.int32)[:, 0],
    )


def restore_rows(store: TokenStore, saved: SavedRows) -> None:
    """Fill an empty store; its pool, page size and device may differ from those of the saved one.

    Raises:
        PoolExhausted: the pool has too few pages and may not grow; nothing has changed.
        ValueError: the store holds tokens, or as `SavedRows.expect`.
    """
    layers, sequences, heads = store.length.shape
    saved.expect(store.layout, (layers, sequences, heads))
    store.fill(saved.length.to(store.pool.device))
    layout, data, block = store.layout, store.pool.data, store.layout.format.block

    def write(segment: Segment, each: int, source: UInt8[Tensor, "_ _"]) -> None:
        page, row = _places(store, each)
        for some in pieces(len(source), segment.width):
            put(data, segment, page[some], row[some], source[some].to(data.device))

    for segment, part in zip(format_segments(layout), saved.parts, strict=True):
        write(segment, block, part)
    for beside, x in (
        (score_segment(layout), saved.score),
        (position_segment(layout), saved.position),
    ):
        if beside is not None and x is not None:
            write(beside, 1, x[:, None].contiguous().view(torch.uint8))
    if isinstance(store, BlockStore):
        store.count_holes()


def _places(store: TokenStore, each: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Return the page and the row of every `each` slots of all table rows, in order."""
    count = store.length.flatten().long() // each
    table_row, index = spread(torch.zeros_like(count), count, int(count.sum()))
    rows = store.layout.tokens // each
    return store.page_table.lookup(table_row, index // rows), index % rows


def _expect(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise ValueError(f"{name} should be {dtype} of {shape}, found {x.dtype} of {(*x.shape,)}")
