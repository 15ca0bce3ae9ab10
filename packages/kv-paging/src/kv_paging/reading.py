"""What stands in the slots of streams: reading it, and giving tokens new scores."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_paging.checks import expect_cover, expect_shape
from kv_paging.moves import Segment, position_segment, score_segment, take, take_pages
from kv_paging.streams import Streams
from kv_paging.table import pages_for, spread
from kv_paging.tokens import (
    BOTH,
    NONE,
    Stored,
    Vectors,
    read_positions,
    read_scores,
    read_tokens,
    write_scores,
)


class Readable(Streams):
    """Streams whose slots hold tokens.

    Operations on streams by number check the numbers, and wait for the device to do so. Those on a
    layer or on all streams do not wait, and give as many slots as `longest` says.
    """

    def read(self, streams: Int[Tensor, " S"], vectors: Vectors = NONE) -> Stored:
        """Give what streams hold: scores and positions where pages have them, vectors if asked.

        Vectors are decoded for all streams named, so name few at a time, such as one layer's.
        """
        streams, length, wrong = self._named(streams)
        (longest,) = self._agree(wrong, most(length))
        return self._read(streams, length, longest, vectors)

    def read_layer(self, layer: int, vectors: Vectors = NONE) -> Stored:
        """Give what the streams of a layer hold, as `read` does, over `longest` slots."""
        return self.read_layers(slice(layer, layer + 1), vectors)

    def read_layers(self, layers: slice, vectors: Vectors = NONE) -> Stored:
        """Give what the streams of some layers hold, as `read_layer` does."""
        length = self._length[layers].flatten().long()
        return self._read(self.streams(layers), length, self.longest, vectors)

    def fetch(self, streams: Int[Tensor, " S"], slot: Int[Tensor, " S"]) -> Stored:
        """Read one token of each stream, vectors included, as tensors of length 1.

        Slot -1 gives no token. This is how a token is taken to another tier: fetched here, appended
        there, removed here.

        Raises:
            ValueError: a slot that holds no token.
        """
        expect_shape("slot", slot, streams.shape[0])
        streams, length, wrong = self._named(streams)
        self._agree_slots(wrong, slot, length)
        return self._fetch(streams, slot)

    def set_scores(self, streams: Int[Tensor, " S"], score: Float[Tensor, "S L"]) -> None:
        """Give stored tokens new scores, slot by slot; what lies past a stream's end is unused.

        Raises:
            ValueError: pages hold no scores, or some tokens would get none.
        """
        segment = self._score_segment()
        expect_shape("score", score, streams.shape[0], None)
        streams, length, wrong = self._named(streams)
        held = self._pages_for(length)
        longest, total = self._agree(wrong, most(length), held.sum())
        expect_cover("score", score.shape[1], longest)
        score = self._by_page(streams, length, score, longest)
        row, column = spread(torch.zeros_like(held), held, total)
        by_page = score[row, column]
        write_scores(self.pool.data, segment, self._table.lookup(streams[row], column), by_page)

    def set_layer_scores(self, layer: int, score: Float[Tensor, "S L"]) -> None:
        """Give the tokens of a layer new scores, slot by slot as `read_layer` has them.

        Raises:
            ValueError: pages hold no scores, or fewer slots than `longest` says are given.
        """
        self.set_layers_scores(slice(layer, layer + 1), score)

    def set_layers_scores(self, layers: slice, score: Float[Tensor, "S L"]) -> None:
        """Give the tokens of some layers new scores, as `set_layer_scores` does.

        Raises:
            ValueError: pages hold no scores, or fewer slots than `longest` says are given.
        """
        segment = self._score_segment()
        streams = self.streams(layers)
        length = self._length[layers].flatten().long()
        expect_shape("score", score, streams.shape[0], None)
        expect_cover("score", score.shape[1], self.longest)
        score = self._by_page(streams, length, score, self.longest)
        page = self._table.block(streams, score.shape[1])
        held = before(self._pages_for(length), page.shape[1])
        # What lies past a stream's last page goes to the scratch page.
        page = page.where(held, self.pool.capacity)
        write_scores(self.pool.padded, segment, page.flatten(), score.flatten(0, 1))

    def weakest(self, streams: Int[Tensor, " S"]) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Give the lowest score of each stream and its slot, the first of equal ones.

        An empty stream gives inf and -1. Only scores are read.

        Raises:
            ValueError: pages hold no scores.
        """
        streams, length, wrong = self._named(streams)
        (longest,) = self._agree(wrong, most(length))
        return self._weakest(streams, length, longest)

    def weakest_all(
        self, until: Int[Tensor, " S"] | None = None
    ) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Give the same as `weakest`, for all streams, of the tokens of positions before `until`.

        Raises:
            ValueError: pages hold no scores, or no positions where these are asked about.
        """
        length = self._length.flatten().long()
        return self._weakest(self.streams(), length, self.longest, until)

    def _read(self, streams: Tensor, length: Tensor, longest: int, vectors: Vectors) -> Stored:
        page = self._table.block(streams, pages_for(longest, self.layout.tokens))
        take_all = partial(self._rows, page)
        held = self._present(length, longest, take_all)
        return read_tokens(self.layout, held, take_all, vectors)

    def _fetch(self, streams: Tensor, slot: Tensor) -> Stored:
        block = self.layout.format.block
        page, row = self._place(streams[:, None], slot.clamp(min=0)[:, None])

        def take_one(segment: Segment) -> Tensor:
            # Scores and positions have a row per token, the parts of the format one per block.
            at = row if segment.rows == self.layout.tokens else row // block
            return take(self.pool.data, segment, page, at)

        inside = row[:, 0] % block if block > 1 else None
        return read_tokens(self.layout, (slot >= 0)[:, None], take_one, BOTH, inside)

    def _weakest(
        self, streams: Tensor, length: Tensor, longest: int, until: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        segment, positions = self._score_segment(), position_segment(self.layout)
        if until is not None and positions is None:
            raise ValueError(
                "pages of this layout hold no positions; lay them out with positions=True"
            )
        # One slot at least, for argmin to point at where all streams are empty.
        page = self._table.block(streams, pages_for(max(longest, 1), self.layout.tokens))
        take_all = partial(self._rows, page)
        score = read_scores(take_all(segment))
        held = self._present(length, score.shape[1], take_all)
        if until is not None and positions is not None:
            held = held & (read_positions(take_all(positions)) < until[:, None])
        score = score.masked_fill(~held, torch.inf)
        slot = score.argmin(1)
        # Where all that is held has the score inf, the first inf may be a place without a token.
        slot = slot.where(held.gather(1, slot[:, None])[:, 0], held.int().argmax(1))
        return score.gather(1, slot[:, None])[:, 0], slot.where(held.any(1), -1)

    def _rows(self, page: Tensor, segment: Segment) -> Tensor:
        return take_pages(self.pool.data, segment, page)

    def _present(
        self, length: Tensor, slots: int, take_all: Callable[[Segment], Tensor]
    ) -> Bool[Tensor, "S L"]:
        """Say which of the first slots hold a token; `take_all` reads a segment of all of them."""
        return before(length, slots)

    def _keep_holes(self, streams: Tensor, length: Tensor, score: Tensor) -> Tensor:
        """Give the scores that are to be written, where there are places without a token."""
        return score

    def _by_page(self, streams: Tensor, length: Tensor, score: Tensor, longest: int) -> Tensor:
        shape = (score.shape[0], pages_for(longest, self.layout.tokens), self.layout.tokens)
        padded = score.new_zeros(shape)
        padded.flatten(1)[:, :longest] = score[:, :longest]
        return self._keep_holes(streams, length, padded.flatten(1)).view(shape)

    def _score_segment(self) -> Segment:
        segment = score_segment(self.layout)
        if segment is None:
            raise ValueError("pages of this layout hold no scores; lay them out with scores=True")
        return segment

    def _agree_slots(
        self, wrong: Tensor, slot: Tensor, length: Tensor, *values: Tensor
    ) -> list[int]:
        empty = (slot < -1) | (slot >= length)
        strange, *known = self._agree(wrong, empty.sum(), *values)
        if strange:
            first = int(empty.int().argmax())
            raise ValueError(
                f"slot {int(slot[first])} holds no token, the stream has {int(length[first])}; "
                "name a slot before that, or -1 to leave the stream alone"
            )
        return known


def before(end: Int[Tensor, " S"], slots: int) -> Bool[Tensor, "S slots"]:
    """Mark the slots before each end."""
    return torch.arange(slots, device=end.device) < end[:, None]


def most(length: Int[Tensor, " S"]) -> Int[Tensor, ""]:
    """Give the largest length, 0 if there is none."""
    return length.amax() if length.numel() else length.new_zeros(())
