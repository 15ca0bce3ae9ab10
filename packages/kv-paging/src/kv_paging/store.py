"""One tier of a cache: tokens of one format, with what belongs to them, in streams of pages."""

from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_paging.checks import expect_cover, expect_field, expect_shape
from kv_paging.moves import Segment, move, score_segment, take, take_pages
from kv_paging.streams import Streams
from kv_paging.table import pages_for, spread
from kv_paging.tokens import Stored, read_scores, read_tokens, write_scores, write_tokens

_ROWS: Final = 1 << 14  # tokens encoded at a time: what a codec needs for them stays small


class TokenStore(Streams):
    """The tokens of one tier; tokens are encoded once, and after that only bytes move."""

    def append(
        self,
        streams: Int[Tensor, " S"],
        key: Float[Tensor, "S L D"],
        value: Float[Tensor, "S L Dv"],
        keep: Bool[Tensor, "S L"],
        score: Float[Tensor, "S L"] | None = None,
        position: Int[Tensor, "S L"] | None = None,
    ) -> None:
        """Encode the tokens marked by `keep` and put them, in order, at the ends of their streams.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow.
            ValueError: shapes that do not fit, scores or positions missing or not stored here.
        """
        expect_shape("keep", keep, streams.shape[0], None)
        self._expect_tokens(key, value, score, position, *keep.shape)
        if keep.numel() == 0:
            return
        streams, length, wrong = self._named(streams)
        after = length + keep.sum(1)
        held, needed = self._pages_for(length), self._pages_for(after)
        total, widest = self._agree(wrong, (needed - held).sum(), needed.amax())
        pages = self.pool.allocate(total)
        try:
            self._enter(streams, held, needed - held, pages, widest)
            slot = length[:, None] + keep.cumsum(1) - 1
            for kept in torch.split(keep.flatten().nonzero()[:, 0], _ROWS):
                place = (kept // keep.shape[1], kept % keep.shape[1])
                where = self._place(streams[place[0]], slot[place])
                self._write(where, place, key, value, score, position)
        except BaseException:
            self.pool.release(pages)
            raise
        self._set_length(streams, after)

    def read(
        self,
        streams: Int[Tensor, " S"],
        vectors: frozenset[Literal["keys", "values"]] = frozenset(),
    ) -> Stored:
        """Give what streams hold: scores and positions where pages have them, vectors if asked.

        Vectors are decoded for all streams named, so name few at a time, such as one layer's.
        """
        streams, length, wrong = self._named(streams)
        (longest,) = self._agree(wrong, _most(length))
        page = self._table.block(streams, pages_for(longest, self.layout.tokens))

        def take_all(segment: Segment) -> Tensor:
            return take_pages(self.pool.data, segment, page)

        return read_tokens(self.layout, _before(length, longest), take_all, vectors)

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
        page, row = self._place(streams[:, None], slot.clamp(min=0)[:, None])

        def take_one(segment: Segment) -> Tensor:
            return take(self.pool.data, segment, page, row)

        both: frozenset[Literal["keys", "values"]] = frozenset({"keys", "values"})
        return read_tokens(self.layout, (slot >= 0)[:, None], take_one, both)

    def set_scores(self, streams: Int[Tensor, " S"], score: Float[Tensor, "S L"]) -> None:
        """Give stored tokens new scores, slot by slot; what lies past a stream's end is unused.

        Raises:
            ValueError: pages hold no scores, or some tokens would get none.
        """
        segment = self._score_segment()
        expect_shape("score", score, streams.shape[0], None)
        tokens = self.layout.tokens
        streams, length, wrong = self._named(streams)
        held = self._pages_for(length)
        longest, total = self._agree(wrong, _most(length), held.sum())
        expect_cover("score", score.shape[1], longest)
        row, column = spread(torch.zeros_like(held), held, total)
        shape = (score.shape[0], pages_for(longest, tokens), tokens)
        padded = score.new_zeros(shape)
        padded.flatten(1)[:, :longest] = score[:, :longest]
        by_page = padded[row, column]
        write_scores(self.pool.data, segment, self._table.lookup(streams[row], column), by_page)

    def compact(self, streams: Int[Tensor, " S"], keep: Bool[Tensor, "S L"]) -> int:
        """Let go of the tokens not marked by `keep`; whole pages go back to the pool.

        Kept tokens past the new end move into the holes before it, the first into the first, with
        their scores and positions (MoveCache, Algorithm 1 of KV-Compress).

        Returns:
            Pages that went back.

        Raises:
            ValueError: `keep` says nothing about some tokens.
        """
        expect_shape("keep", keep, streams.shape[0], None)
        streams, length, wrong = self._named(streams)
        stay = keep & _before(length, keep.shape[1])
        after = stay.sum(1)
        freed = (self._pages_for(length) - self._pages_for(after)).sum()
        longest, total = self._agree(wrong, _most(length), freed)
        expect_cover("keep", keep.shape[1], longest)
        inside = _before(after, keep.shape[1])
        # A stream has as many kept tokens past its new end as holes before it, so the two lists,
        # both in the order of streams, pair up by themselves.
        source = (stay & ~inside).nonzero()
        target = (~stay & inside).nonzero()
        move(
            self.pool.data,
            self.layout,
            self._place(streams[source[:, 0]], source[:, 1]),
            self._place(streams[target[:, 0]], target[:, 1]),
        )
        self._shorten(streams, length, after, total)
        return total

    def replace(
        self,
        streams: Int[Tensor, " S"],
        slot: Int[Tensor, " S"],
        key: Float[Tensor, "S D"],
        value: Float[Tensor, "S Dv"],
        score: Float[Tensor, " S"] | None = None,
        position: Int[Tensor, " S"] | None = None,
    ) -> None:
        """Overwrite one token of each stream in place; slot -1 leaves a stream alone.

        Raises:
            ValueError: a slot that holds no token, shapes that do not fit, scores or positions
                missing or not stored here.
        """
        expect_shape("slot", slot, streams.shape[0])
        self._expect_tokens(key, value, score, position, streams.shape[0])
        streams, length, wrong = self._named(streams)
        self._agree_slots(wrong, slot, length)
        chosen = (slot >= 0).nonzero()[:, 0]
        where = self._place(streams[chosen], slot[chosen])
        self._write(where, (chosen,), key, value, score, position)

    def remove(self, streams: Int[Tensor, " S"], slot: Int[Tensor, " S"]) -> None:
        """Let go of one token of each stream; the stream's last token moves into its slot.

        Slot -1 leaves a stream alone. A page that becomes empty goes back to the pool.

        Raises:
            ValueError: a slot that holds no token.
        """
        expect_shape("slot", slot, streams.shape[0])
        streams, length, wrong = self._named(streams)
        after = length - (slot >= 0).long()
        freed = (self._pages_for(length) - self._pages_for(after)).sum()
        (total,) = self._agree_slots(wrong, slot, length, freed)
        chosen = (slot >= 0).nonzero()[:, 0]
        move(
            self.pool.data,
            self.layout,
            self._place(streams[chosen], after[chosen]),
            self._place(streams[chosen], slot[chosen]),
        )
        self._shorten(streams, length, after, total)

    def weakest(self, streams: Int[Tensor, " S"]) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Give the lowest score of each stream and its slot, the first of equal ones.

        An empty stream gives inf and -1. Only scores are read.

        Raises:
            ValueError: pages hold no scores.
        """
        segment = self._score_segment()
        streams, length, wrong = self._named(streams)
        (longest,) = self._agree(wrong, _most(length))
        # One slot at least, for argmin to point at where all streams are empty.
        page = self._table.block(streams, pages_for(max(longest, 1), self.layout.tokens))
        score = read_scores(take_pages(self.pool.data, segment, page))
        score = score.masked_fill(~_before(length, score.shape[1]), torch.inf)
        slot = score.argmin(1)
        return score.gather(1, slot[:, None])[:, 0], slot.where(length > 0, -1)

    def _score_segment(self) -> Segment:
        segment = score_segment(self.layout)
        if segment is None:
            raise ValueError("pages of this layout hold no scores; lay them out with scores=True")
        return segment

    def _expect_tokens(
        self, key: Tensor, value: Tensor, score: Tensor | None, position: Tensor | None, *shape: int
    ) -> None:
        expect_shape("key", key, *shape, self.layout.format.key.dim)
        expect_shape("value", value, *shape, self.layout.format.value.dim)
        expect_field("score", score, self.layout.scores, *shape)
        expect_field("position", position, self.layout.positions, *shape)

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

    def _write(
        self,
        where: tuple[Tensor, Tensor],
        place: tuple[Tensor, ...],
        key: Tensor,
        value: Tensor,
        score: Tensor | None,
        position: Tensor | None,
    ) -> None:
        """Write the tokens at `place` in the tensors to their pages and rows."""
        if where[0].numel():
            write_tokens(
                self.pool.data,
                self.layout,
                *where,
                key[place],
                value[place],
                None if score is None else score[place],
                None if position is None else position[place],
            )


def _before(end: Tensor, slots: int) -> Tensor:
    return torch.arange(slots, device=end.device) < end[:, None]


def _most(length: Tensor) -> Tensor:
    return length.amax() if length.numel() else length.new_zeros(())
