"""One tier of a cache: tokens of one format, with what belongs to them, in streams of pages."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_paging.checks import expect_cover, expect_field, expect_shape
from kv_paging.moves import move
from kv_paging.reading import Readable, most
from kv_paging.selecting import select_all
from kv_paging.torch_kernels import before


class TokenStore(Readable):
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
            ValueError: shapes that do not fit, scores or positions missing or not stored here, or
                a number of tokens that does not fill blocks of those encoded together.
        """
        expect_shape("keep", keep, streams.shape[0], None)
        self.expect_tokens(key, value, score, position, *keep.shape)
        if keep.numel() == 0:
            return
        block = self.layout.format.block
        streams, length, wrong = self._named(streams)
        after = length + keep.sum(1)
        held, needed = self._pages_for(length), self._pages_for(after)
        total, columns, longest, odd = self._agree(
            wrong,
            (needed - held).sum(),
            self._columns_if(streams, needed),
            self._longest_if(streams, after),
            (after % block).sum(),
        )
        if odd:
            raise ValueError(
                f"{block} tokens are encoded together here, and a stream is given a number that "
                "does not fill such blocks; append through Tiers, where the others wait"
            )
        pages = self.pool.allocate(total)
        try:
            self._enter(streams, held, needed - held, pages, columns)
            tokens = (key, value, score, position)
            self.kernels.write(self.whole(), streams, length, keep, *tokens)
        except BaseException:
            self.pool.release(pages)
            raise
        self._set_length(streams, after, longest)

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
        return self._close_up(streams, length, wrong, keep & before(length, keep.shape[1]), 1)

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
        self.expect_tokens(key, value, score, position, streams.shape[0])
        streams, length, wrong = self._named(streams)
        self._agree_slots(wrong, slot, length)
        self.kernels.write(
            self.whole(),
            streams,
            slot,
            (slot >= 0)[:, None],
            key[:, None],
            value[:, None],
            None if score is None else score[:, None],
            None if position is None else position[:, None],
        )

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
        total, longest = self._agree_slots(
            wrong, slot, length, freed, self._longest_if(streams, after)
        )
        chosen = (slot >= 0).nonzero()[:, 0]
        move(
            self.pool.data,
            self.layout,
            self._place(streams[chosen], after[chosen]),
            self._place(streams[chosen], slot[chosen]),
        )
        self._shorten(streams, length, after, total, longest)

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Let the sequences become source[0], source[1], ...: beams, repeats, a smaller batch.

        Raises:
            PoolExhausted: too few pages for the copies, those given back counted in.
            ValueError: a sequence that does not exist, or none; or a store that shares its table.
        """
        if self._facing is not None:
            raise ValueError("two stores share a page table; select both, as Tiers.select does")
        select_all((self,), source)

    def expect_tokens(
        self, key: Tensor, value: Tensor, score: Tensor | None, position: Tensor | None, *shape: int
    ) -> None:
        """Refuse tokens that do not fit the layout.

        Raises:
            ValueError: a shape that does not fit, scores or positions missing or not stored here.
        """
        expect_shape("key", key, *shape, self.layout.format.key.dim)
        expect_shape("value", value, *shape, self.layout.format.value.dim)
        expect_field("score", score, self.layout.scores, *shape)
        expect_field("position", position, self.layout.positions, *shape)

    def _close_up(
        self, streams: Tensor, length: Tensor, wrong: Tensor, stay: Tensor, block: int
    ) -> int:
        """Let go of the blocks of `block` slots that are not marked; the last ones fill the gaps.

        Returns:
            Pages that went back.
        """
        after = stay.sum(1) * block
        freed = (self._pages_for(length) - self._pages_for(after)).sum()
        longest, total, remains = self._agree(
            wrong, most(length), freed, self._longest_if(streams, after)
        )
        expect_cover("keep", stay.shape[1] * block, longest)
        self.kernels.close_up(self.whole(), streams, stay)
        self._shorten(streams, length, after, total, remains)
        return total
