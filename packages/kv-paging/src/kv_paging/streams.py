"""Streams over a pool: which pages each holds and how many tokens, whatever the tokens are."""

from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging.checks import expect_shape, expect_within
from kv_paging.moves import copy_pages
from kv_paging.pool import PagePool
from kv_paging.table import PageTable, pages_for, spread
from kv_policy import PagedTokens, PageLayout

_ALL: Final = slice(None)


class Streams:
    """A stream of slots per layer, sequence and KV head, each with a length of its own.

    Slot i of a stream is slot i % tokens of the stream's page i // tokens. Operations take the ids
    of the streams they are about, each named once, and work on all of them at once. What is
    refused, by PoolExhausted or otherwise, leaves everything as it was. Several stores, of
    different layouts, may share a pool.

    Here and in TokenStore, the host waits for the device where `_agree` reads the few numbers that
    an operation must know (how many pages, how long, whether the arguments are right): once an
    operation. select, clear and truncate wait once more to check sequences; append, replace and
    remove once more, and compact twice, to list tokens with `nonzero`. Nothing else waits.
    """

    def __init__(
        self, pool: PagePool, layout: PageLayout, layers: int, sequences: int, heads: int
    ) -> None:
        """Start with empty streams; they hold no page.

        Raises:
            ValueError: the layout's pages are not the pool's, its codecs take several tokens at a
                time, or there would be no stream.
        """
        if layout.nbytes != pool.page_bytes:
            raise ValueError(
                f"the layout is for pages of {layout.nbytes} bytes and the pool's have "
                f"{pool.page_bytes}; lay it out with PageLayout.fitted(format, {pool.page_bytes})"
            )
        if layout.format.block != 1:
            raise ValueError(
                f"the format stores {layout.format.block} tokens at a time; only formats in which "
                "every token stands alone can be stored here"
            )
        if min(layers, sequences, heads) < 1:
            raise ValueError(
                f"{layers} layers, {sequences} sequences and {heads} heads make no stream; give "
                "at least 1 of each"
            )
        self.pool = pool
        self.layout = layout
        self._length = torch.zeros(layers, sequences, heads, dtype=torch.int32, device=pool.device)
        self._table = PageTable(self._length.numel(), pool.device)

    @property
    def table(self) -> Int[Tensor, "N B H T"]:
        """Page ids, int32; what stands past a stream's last page means nothing."""
        return self._table.ids.view(*self._length.shape, -1)

    @property
    def length(self) -> Int[Tensor, "N B H"]:
        """Tokens in each stream, int32."""
        return self._length

    @property
    def pages_used(self) -> int:
        """Pages the streams hold."""
        return int(self._pages_for(self._length).sum())

    @property
    def table_bytes(self) -> int:
        """Memory of page tables and lengths."""
        return self._table.nbytes + self._length.numel() * self._length.itemsize

    def pages(self) -> Int[Tensor, " n"]:
        """Give the ids of all pages the streams hold; for `PagePool.check`."""
        return self._table.within(self._pages_for(self._length.flatten().long()))

    def streams(self, layers: slice = _ALL) -> Int[Tensor, " S"]:
        """Give the ids of the streams of some layers: ((layer * B) + sequence) * H + head."""
        ids = torch.arange(self._length.numel(), device=self.pool.device)
        return ids.view(self._length.shape)[layers].flatten()

    def view(self, layer: int) -> PagedTokens:
        """Give one layer as attention reads it; good until the next operation."""
        return PagedTokens(self.pool.data, self.table[layer], self._length[layer], self.layout)

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Let the sequences become source[0], source[1], ...: beams, repeats, a smaller batch.

        A sequence named for the first time keeps its pages, one named again gets copies of them,
        and one not named gives them back. The number of sequences becomes B2.

        Raises:
            PoolExhausted: too few pages for the copies, those given back counted in.
            ValueError: a sequence that does not exist, or none.
        """
        layers, sequences, heads = self._length.shape
        if source.numel() == 0:
            raise ValueError("no sequence is selected; name at least one, or clear them")
        expect_within("sequence", source, sequences - 1)
        order = torch.arange(source.shape[0], device=source.device)
        again = (source[:, None] == source).int().argmax(1) < order
        gone = torch.ones(sequences, dtype=torch.bool, device=source.device)
        gone[source] = False
        held = self._pages_for(self._length)
        lost = (held * gone[:, None]).flatten()
        copied = (held[:, source] * again[:, None]).flatten()
        back, needed = torch.stack((lost.sum(), copied.sum())).tolist()
        self.pool.reserve(needed - back)  # the only step that can fail
        self.pool.release(self._table.within(lost, back))
        ids = self.streams().view(layers, sequences, heads)
        self._table.reorder(ids[:, source].flatten())
        pages = self.pool.allocate(needed)
        stream, column = spread(torch.zeros_like(copied), copied, needed)
        copy_pages(self.pool.data, self._table.lookup(stream, column), pages)
        self._table.enter(stream, column, pages)
        self._length = self._length[:, source].contiguous()

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Let finished sequences give all their pages back; they go on as empty ones.

        Raises:
            ValueError: a sequence that does not exist, or is named twice.
        """
        layers, every, heads = self._length.shape
        expect_within("sequence", sequences, every - 1)
        streams = self.streams().view(layers, every, heads)[:, sequences].flatten()
        streams, length, wrong = self._named(streams)
        (freed,) = self._agree(wrong, self._pages_for(length).sum())
        self._shorten(streams, length, torch.zeros_like(length), freed)

    def truncate(self, length: Int[Tensor, " B"]) -> None:
        """Let each head of sequence b keep its first length[b] slots at most.

        These are the oldest tokens as long as tokens were only appended.

        Raises:
            ValueError: a negative length, or not one for each sequence.
        """
        expect_shape("length", length, self._length.shape[1])
        if (length < 0).any():
            raise ValueError(f"length is {length.tolist()}; a sequence keeps 0 tokens or more")
        before = self._length.flatten().long()
        after = self._length.long().minimum(length[:, None].long()).flatten()
        freed = int((self._pages_for(before) - self._pages_for(after)).sum())
        self._shorten(self.streams(), before, after, freed)

    def _pages_for(self, length: Tensor) -> Tensor:
        return pages_for(length, self.layout.tokens)

    def _named(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give safe ids, the streams' lengths, and how many ids are repeated or do not exist."""
        every = self._length.numel()
        safe = streams.clamp(0, every - 1)
        mark = torch.zeros(every, dtype=torch.bool, device=self.pool.device)
        mark[safe] = True
        wrong = (safe != streams).sum() + streams.shape[0] - mark.sum()
        return safe, self._length.view(-1)[safe].long(), wrong

    def _agree(self, wrong: Tensor, *values: Tensor) -> list[int]:
        """Read what the host must know, all at once: here the host waits for the device."""
        bad, *known = torch.stack((wrong, *values)).tolist()
        if bad:
            raise ValueError(
                "a stream is named twice or does not exist; name each at most once, with ids from "
                f"0 to {self._length.numel() - 1}"
            )
        return [int(value) for value in known]

    def _enter(
        self, streams: Tensor, held: Tensor, extra: Tensor, pages: Tensor, widest: int
    ) -> None:
        """Deal out pages to streams, `extra` to each after those held; the lengths stay.

        Until a length is set nobody sees the new slots, so this can be given up half-way.
        """
        self._table.widen(widest)
        row, column = spread(held, extra, pages.shape[0])
        self._table.enter(streams[row], column, pages)

    def _shorten(self, streams: Tensor, before: Tensor, after: Tensor, freed: int) -> None:
        """Give back the pages past the new ends, `freed` in all, and set the lengths."""
        first = self._pages_for(after)
        row, column = spread(first, self._pages_for(before) - first, freed)
        self.pool.release(self._table.lookup(streams[row], column))
        self._set_length(streams, after)

    def _set_length(self, streams: Tensor, length: Tensor) -> None:
        self._length.view(-1)[streams] = length.to(self._length.dtype)

    def _place(self, streams: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Give the page, and the row inside it, of a slot of each stream."""
        tokens = self.layout.tokens
        return self._table.lookup(streams, slot // tokens), slot % tokens
