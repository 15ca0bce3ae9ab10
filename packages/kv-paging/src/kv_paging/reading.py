"""What stands in the slots of streams: reading it, and giving tokens new scores."""

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_paging.checks import expect_cover, expect_shape
from kv_paging.moves import Segment, take
from kv_paging.streams import Streams
from kv_paging.tokens import BOTH, NONE, Stored, Vectors, read_tokens
from kv_policy import PagedTokens, Running


class Readable(Streams):
    """Streams whose slots hold tokens.

    Operations on streams by number check the numbers, and wait for the device to do so. Those on a
    layer or on all streams do not wait, and give as many slots as `longest` says.
    """

    def view(self, layer: int) -> PagedTokens:
        """Give one layer as attention reads it; good until the next operation."""
        return self._view(self.table[layer], self._length[layer], self.pool.data)

    def view_layers(self, layers: slice) -> PagedTokens:
        """Give some layers as one, the heads of all side by side; good until the next operation."""
        table, length = (x[layers].movedim(0, 1).flatten(1, 2) for x in (self.table, self._length))
        return self._view(table, length, self.pool.data)

    def whole(self) -> PagedTokens:
        """Give all streams as `PageKernels` take them; good until the pool or the table grows."""
        length = self._length.view(-1, 1)
        return self._view(self._table.ids[:, None], length, self.pool.padded)

    def _view(
        self,
        table: Int[Tensor, "B H T"],
        length: Int[Tensor, "B H"],
        data: UInt8[Tensor, "P nbytes"],
    ) -> PagedTokens:
        return PagedTokens(
            data,
            table,
            length,
            self.layout,
            reverse=self._table.reverse,
            holes=self.in_blocks and self.layout.positions,
            longest=self.longest,
        )

    def read(self, streams: Int[Tensor, " S"], vectors: Vectors = NONE) -> Stored:
        """Give what streams hold: scores and positions where pages have them, vectors if asked.

        Vectors are decoded for all streams named, so name few at a time, such as one layer's.
        """
        streams, length, wrong = self._named(streams)
        (longest,) = self._agree(wrong, most(length))
        return self.kernels.read(self.whole(), streams, longest, vectors)

    def read_layer(self, layer: int, vectors: Vectors = NONE) -> Stored:
        """Give what the streams of a layer hold, as `read` does, over `longest` slots."""
        return self.read_layers(slice(layer, layer + 1), vectors)

    def read_layers(self, layers: slice, vectors: Vectors = NONE) -> Stored:
        """Give what the streams of some layers hold, as `read_layer` does."""
        return self.kernels.read(self.whole(), self.streams(layers), self.longest, vectors)

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
        self._expect_scores()
        expect_shape("score", score, streams.shape[0], None)
        streams, length, wrong = self._named(streams)
        (longest,) = self._agree(wrong, most(length))
        expect_cover("score", score.shape[1], longest)
        self.kernels.rescore(self.whole(), streams, score[:, :longest])

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
        self._expect_scores()
        streams = self.streams(layers)
        expect_shape("score", score, streams.shape[0], None)
        expect_cover("score", score.shape[1], self.longest)
        self.kernels.rescore(self.whole(), streams, score[:, : self.longest])

    def accumulate_layers(
        self,
        layers: slice,
        before: Int[Tensor, " S"],
        mass: Float[Tensor, "S L"],
        seen: Int[Tensor, "S L"],
        running: Running,
    ) -> None:
        """Let the scores of some layers' tokens, means over queries or sums, go on with a pass.

        Args:
            layers: which.
            before: for each stream, the tokens of its sequence before the pass; -1 leaves it alone.
            mass: what the queries of the pass gave each slot, as `read_layers` has them.
            seen: how many of the queries counted for it.
            running: which mean or sum.

        Raises:
            ValueError: pages hold no scores or positions, or fewer slots than `longest` are given.
        """
        self._expect_scores()
        self._expect_positions()
        streams = self.streams(layers)
        for name, x in (("mass", mass), ("seen", seen)):
            expect_shape(name, x, streams.shape[0], None)
            expect_cover(name, x.shape[1], self.longest)
        expect_shape("before", before, streams.shape[0])
        mine = mass[:, : self.longest], seen[:, : self.longest]
        self.kernels.accumulate(self.whole(), streams, before, *mine, running)

    def weakest(self, streams: Int[Tensor, " S"]) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Give the lowest score of each stream and its slot, the first of equal ones.

        An empty stream gives inf and -1. Only scores are read.

        Raises:
            ValueError: pages hold no scores.
        """
        streams, length, wrong = self._named(streams)
        (longest,) = self._agree(wrong, most(length))
        return self._weakest(streams, longest)

    def weakest_all(
        self, until: Int[Tensor, " S"] | None = None
    ) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Give the same as `weakest`, for all streams, of the tokens of positions before `until`.

        Raises:
            ValueError: pages hold no scores, or no positions where these are asked about.
        """
        return self._weakest(self.streams(), self.longest, until)

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
        self, streams: Tensor, slots: int, until: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._expect_scores()
        if until is not None:
            self._expect_positions()
        return self.kernels.weakest(self.whole(), streams, slots, until)

    def _expect_scores(self) -> None:
        if not self.layout.scores:
            raise ValueError("pages of this layout hold no scores; lay them out with scores=True")

    def _expect_positions(self) -> None:
        if not self.layout.positions:
            raise ValueError(
                "pages of this layout hold no positions; lay them out with positions=True"
            )

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


def most(length: Int[Tensor, " S"]) -> Int[Tensor, ""]:
    """Give the largest length, 0 if there is none."""
    return length.amax() if length.numel() else length.new_zeros(())
