"""One tier of a cache: tokens of one format in pages, with scores and positions."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging import torch_kernels
from kv_paging.checks import expect_cover, expect_field, expect_shape
from kv_paging.head_pages import HeadPages, select_all
from kv_paging.kernels import select_page_kernels, shared
from kv_paging.moves import Segment, move, take
from kv_paging.table import pages_for, spread
from kv_paging.tokens import (
    BOTH,
    NONE,
    Stored,
    VectorNames,
    read_tokens,
    write_tokens,
    write_vectors,
)
from kv_paging.torch_kernels import before
from kv_paging.work import CopiedRows, Recoding, TokenWrite
from kv_policy import PagedTokens, Running, TileCounts


class TokenStore(HeadPages):
    """The tokens of one tier; a token is encoded once, after which only its bytes move.

    Operations on rows by number validate the numbers, which synchronizes with the device. Those on
    a layer or on all table rows do not synchronize, and read `longest` slots.
    """

    def view(self, layer: int) -> PagedTokens:
        """Return one layer as attention reads it; valid until the next operation."""
        if self._tiles is None:
            self._tiles = TileCounts(self._length.flatten(1))
        tiles = replace(self._tiles, layer=layer)
        return self._view(self.table[layer], self._length[layer], self.pool.data, tiles)

    def views(self) -> list[PagedTokens]:
        """Return every layer as `view` does, without tiles.

        Valid until the next operation, or longer: see `read_in_place`. Then `longest` is too low.
        """
        data = self.pool.data
        rows = zip(self.table.unbind(0), self._length.unbind(0), strict=True)
        return [self._view(table, length, data) for table, length in rows]

    @property
    def read_in_place(self) -> tuple[Tensor, ...]:
        """The tensors that `views` are made of; as long as they are the same, so are the views."""
        return self.pool.padded, self._table.ids, self._length

    def view_layers(self, layers: slice) -> PagedTokens:
        """Return some layers as one with the heads of all; valid until the next operation."""
        table, length = (x[layers].movedim(0, 1).flatten(1, 2) for x in (self.table, self._length))
        return self._view(table, length, self.pool.data)

    def whole(self) -> PagedTokens:
        """Return all rows as `PageKernels` read them; valid until the pool or the table grows."""
        length = self._length.view(-1, 1)
        return self._view(self._table.ids[:, None], length, self.pool.padded)

    def update_bounds(self) -> None:
        """Compute the bounds of full pages that have none, if they are kept."""
        if self._bounds is not None:
            self._bounds.update(self.whole(), self.kernels, self.changes)

    def read(self, table_rows: Int[Tensor, " S"], vectors: VectorNames = NONE) -> Stored:
        """Return the tokens in table rows: scores and positions if stored, vectors if requested.

        Vectors are decoded for all these table rows, so read few at a time, such as one layer's.
        """
        table_rows, length, wrong = self._named(table_rows)
        (longest,) = self._agree(wrong, most(length))
        return self.kernels.read(self.whole(), table_rows, longest, vectors)

    def read_layer(self, layer: int, vectors: VectorNames = NONE) -> Stored:
        """Return the tokens in the table rows of a layer, as `read`, over `longest` slots."""
        return self.read_layers(slice(layer, layer + 1), vectors)

    def read_layers(self, layers: slice, vectors: VectorNames = NONE) -> Stored:
        """Return the tokens in the table rows of some layers, as `read_layer`."""
        return self.kernels.read(self.whole(), self.table_rows(layers), self.longest, vectors)

    def fetch(self, table_rows: Int[Tensor, " S"], slot: Int[Tensor, " S"]) -> Stored:
        """Read one token of each table row, including vectors, as tensors of length 1.

        Slot -1 returns no token. To move a token to another tier, fetch it here, append it there,
        and remove it here.

        Raises:
            ValueError: a slot that holds no token.
        """
        expect_shape("slot", slot, table_rows.shape[0])
        table_rows, length, wrong = self._named(table_rows)
        self._agree_slots(wrong, slot, length)
        return self._fetch(table_rows, slot)

    def set_scores(self, table_rows: Int[Tensor, " S"], score: Float[Tensor, "S L"]) -> None:
        """Set the scores of stored tokens, slot by slot; those past a table row's end are ignored.

        Raises:
            ValueError: pages store no scores, or some tokens are not covered.
        """
        self._expect_scores()
        expect_shape("score", score, table_rows.shape[0], None)
        table_rows, length, wrong = self._named(table_rows)
        (longest,) = self._agree(wrong, most(length))
        expect_cover("score", score.shape[1], longest)
        self.own(table_rows)
        self.kernels.rescore(self.whole(), table_rows, score[:, :longest])

    def set_layer_scores(self, layer: int, score: Float[Tensor, "S L"]) -> None:
        """Set the scores of a layer's tokens, slot by slot as in `read_layer`.

        Raises:
            ValueError: pages store no scores, or fewer slots than `longest` are given.
        """
        self.set_layers_scores(slice(layer, layer + 1), score)

    def set_layers_scores(self, layers: slice, score: Float[Tensor, "S L"]) -> None:
        """Set the scores of some layers' tokens, as `set_layer_scores`.

        Raises:
            ValueError: pages store no scores, or fewer slots than `longest` are given.
        """
        self._expect_scores()
        table_rows = self.table_rows(layers)
        expect_shape("score", score, table_rows.shape[0], None)
        expect_cover("score", score.shape[1], self.longest)
        self.own(table_rows)
        self.kernels.rescore(self.whole(), table_rows, score[:, : self.longest])

    def accumulate_layers(
        self,
        layers: slice,
        before: Int[Tensor, " S"],
        mass: Float[Tensor, "S L"],
        seen: Int[Tensor, "S L"],
        running: Running,
        position: Int[Tensor, "S L"] | None = None,
    ) -> None:
        """Update the scores of some layers' tokens, means over queries or sums, with a pass.

        Args:
            layers: the layers.
            before: for each row, the tokens of its sequence before the pass; -1 skips the row.
            mass: attention mass of the queries of the pass per slot, in the order of `read_layers`.
            seen: number of queries counted per slot.
            running: the kind of mean or sum.
            position: positions per slot, -1 for empty ones, if pages store none.

        Raises:
            ValueError: pages store no scores, positions are missing or also stored here, or fewer
                slots than `longest` are given.
        """
        self._expect_scores()
        if position is None:
            self._expect_positions()
        table_rows, longest = self.table_rows(layers), self.longest
        given = {"mass": mass, "seen": seen} | ({} if position is None else {"position": position})
        for name, x in given.items():
            expect_shape(name, x, table_rows.shape[0], None)
            expect_cover(name, x.shape[1], longest)
        expect_shape("before", before, table_rows.shape[0])
        self.own(table_rows[before >= 0])
        mine = mass[:, :longest], seen[:, :longest]
        places = () if position is None else (position[:, :longest],)
        self.kernels.accumulate(self.whole(), table_rows, before, *mine, running, *places)

    def weakest(
        self, table_rows: Int[Tensor, " S"]
    ) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Return the lowest score of each table row and its slot, the first on a tie.

        An empty table row returns inf and -1. Only scores are read.

        Raises:
            ValueError: pages store no scores.
        """
        table_rows, length, wrong = self._named(table_rows)
        (longest,) = self._agree(wrong, most(length))
        return self._weakest(table_rows, longest)

    def weakest_all(
        self, until: Int[Tensor, " S"] | None = None
    ) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Return the same as `weakest` for all rows, of the tokens at positions before `until`.

        Raises:
            ValueError: pages store no scores, or no positions although `until` is given.
        """
        return self._weakest(self.table_rows(), self.longest, until)

    def append(
        self,
        table_rows: Int[Tensor, " S"],
        key: Float[Tensor, "S L D"],
        value: Float[Tensor, "S L Dv"],
        keep: Bool[Tensor, "S L"],
        score: Float[Tensor, "S L"] | None = None,
        position: Int[Tensor, "S L"] | None = None,
    ) -> None:
        """Encode the tokens marked by `keep` and append them, in order, to their table rows.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow.
            ValueError: shapes do not match, scores or positions are missing or not stored here, or
                the number of tokens of a block-encoded format is not a multiple of the block size.
        """
        expect_shape("keep", keep, table_rows.shape[0], None)
        self.expect_tokens(key, value, score, position, *keep.shape)

        def write(table_rows: Tensor, start: Tensor) -> None:
            tokens = TokenWrite(table_rows, start, keep, key, value, score, position)
            self.kernels.write(self.whole(), tokens)

        self._append(table_rows, keep, write)

    def append_stored(
        self, table_rows: Int[Tensor, " S"], source: PagedTokens, keep: Bool[Tensor, "S L"]
    ) -> None:
        """Encode stored tokens anew and append them, with their scores and positions, as `append`.

        Args:
            table_rows: the table rows.
            source: for each of them a row of tokens in other pages, such as one of `copied`.
            keep: the slots of the source whose tokens are appended; those past the end are not.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow.
            ValueError: shapes do not match, the source has other dimensions or lacks scores or
                positions, or as `append`.
        """
        self.expect_source(source, table_rows.shape[0])
        keep = held_of(source, keep)

        def write(table_rows: Tensor, start: Tensor) -> None:
            rows = torch.arange(len(table_rows), device=self.pool.device)
            tokens = Recoding(source, rows, table_rows, start, keep)
            own = select_page_kernels(source.layout, self.pool.device, self.pool.kernels)
            shared([self.kernels, own]).recode(self.whole(), tokens)

        self._append(table_rows, keep, write)

    def copied(self, table_rows: Int[Tensor, " S"]) -> CopiedRows:
        """Return the tokens in table rows as they are stored, in memory outside of the pool.

        A row has one head in the result, as `PageKernels` read it.
        """
        table_rows, length, wrong = self._named(table_rows)
        count = self._pages_for(length)
        total, longest = self._agree(wrong, count.sum(), most(length))
        row, column = spread(torch.zeros_like(count), count, total)
        pages = self._table.lookup(table_rows[row], column).long()
        last = pages.new_full((1,), self.pool.capacity)  # the scratch page
        data = self.pool.padded.index_select(0, torch.cat((pages, last)))
        table = length.new_zeros(len(length), pages_for(longest, self.layout.tokens))
        table[row, column] = torch.arange(total, device=data.device)
        rows = replace(self.whole(), data=data, table=table[:, None], length=length[:, None])
        return (replace(rows, reverse=False, longest=longest),)

    def _append(
        self,
        table_rows: Tensor,
        keep: Tensor,
        write: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Append the tokens that `write` writes to table rows from a first slot on."""
        if keep.numel() == 0:
            return
        block = self.layout.format.block
        table_rows, length, wrong = self._named(table_rows)
        after = length + keep.sum(1)
        held, needed = self._pages_for(length), self._pages_for(after)
        total, columns, longest, odd = self._agree(
            wrong,
            (needed - held).sum(),
            self._columns_if(table_rows, needed),
            self._longest_if(table_rows, after),
            (after % block).sum(),
        )
        if odd:
            raise ValueError(
                f"{block} tokens are encoded together here, and a table row is given a number that "
                "does not fill such blocks; append through Tiers, which store the residual raw"
            )
        pages = self.pool.allocate(total)
        try:
            self._enter(table_rows, held, needed - held, pages, columns)
            write(table_rows, length)
        except BaseException:
            self.pool.release(pages)
            raise
        self._set_length(table_rows, after, longest)

    def compact(self, table_rows: Int[Tensor, " S"], keep: Bool[Tensor, "S L"]) -> int:
        """Evict the tokens not marked by `keep`; return whole pages to the pool.

        Kept tokens past the new end move into the holes before it, in order, with their scores and
        positions (MoveCache, Algorithm 1 of KV-Compress).

        Returns:
            The number of pages returned to the pool.

        Raises:
            ValueError: `keep` does not cover all tokens.
        """
        expect_shape("keep", keep, table_rows.shape[0], None)
        table_rows, length, wrong = self._named(table_rows)
        return self._compact(table_rows, length, wrong, keep & before(length, keep.shape[1]), 1)

    def replace(
        self,
        table_rows: Int[Tensor, " S"],
        slot: Int[Tensor, " S"],
        key: Float[Tensor, "S D"],
        value: Float[Tensor, "S Dv"],
        score: Float[Tensor, " S"] | None = None,
        position: Int[Tensor, " S"] | None = None,
    ) -> None:
        """Overwrite one token of each table row in place; slot -1 leaves a table row unchanged.

        Raises:
            ValueError: a slot that holds no token, shapes that do not match, or scores or positions
                missing or not stored here.
        """
        expect_shape("slot", slot, table_rows.shape[0])
        self.expect_tokens(key, value, score, position, table_rows.shape[0])
        table_rows, length, wrong = self._named(table_rows)
        self._agree_slots(wrong, slot, length)
        self.own(table_rows, _at(slot, self.longest))
        if self._bounds is not None:
            self._bounds.forget(table_rows, slot >= 0)
        tokens = TokenWrite(
            table_rows,
            slot,
            (slot >= 0)[:, None],
            key[:, None],
            value[:, None],
            None if score is None else score[:, None],
            None if position is None else position[:, None],
        )
        self.kernels.write(self.whole(), tokens)

    def rewrite(
        self,
        table_rows: Int[Tensor, " S"],
        some: Bool[Tensor, "S L"],
        key: Float[Tensor, "n D"] | None,
        value: Float[Tensor, "n Dv"],
    ) -> None:
        """Encode other vectors for the marked tokens in place; scores and positions stay.

        Pages that other rows hold, too, are copied first.

        Args:
            table_rows: the table rows; each once.
            some: the n slots to rewrite.
            key: of their tokens, row by row in the order of slots; None: the stored keys stay.
            value: of their tokens.

        Raises:
            PoolExhausted: the pool has too few pages for the copies; nothing has changed.
            ValueError: a marked slot holds no token, shapes do not match, or tokens of this format
                are encoded together or have values in keys.
        """
        form = self.layout.format
        if form.block > 1 or form.value_in_key:
            raise ValueError(
                "tokens whose bytes are in those of others, or values in those of keys, cannot be "
                "rewritten one by one; use a format that encodes each vector separately"
            )
        expect_shape("some", some, table_rows.shape[0], None)
        table_rows, length, wrong = self._named(table_rows)
        count, beyond = self._agree(
            wrong, some.sum(), (some & ~before(length, some.shape[1])).sum()
        )
        if beyond:
            raise ValueError(f"{beyond} marked slots hold no token; mark slots before a row's end")
        expect_shape("value", value, count, form.value.dim)
        if key is not None:
            expect_shape("key", key, count, form.key.dim)
        if not count:
            return
        self.own(table_rows, some)
        if self._bounds is not None and key is not None:
            self._bounds.forget(table_rows, some.any(1))
        row, slot = some.nonzero().unbind(1)
        write_vectors(self.pool.data, self.layout, *self._place(table_rows[row], slot), key, value)

    def remove(self, table_rows: Int[Tensor, " S"], slot: Int[Tensor, " S"]) -> None:
        """Evict one token of each table row; the table row's last token moves into its slot.

        Slot -1 leaves a table row unchanged. A page that becomes empty returns to the pool.

        Raises:
            ValueError: a slot that holds no token.
        """
        expect_shape("slot", slot, table_rows.shape[0])
        table_rows, length, wrong = self._named(table_rows)
        after = length - (slot >= 0).long()
        freed = (self._pages_for(length) - self._pages_for(after)).sum()
        total, longest = self._agree_slots(
            wrong, slot, length, freed, self._longest_if(table_rows, after)
        )
        self.own(table_rows, _at(slot, self.longest))
        chosen = (slot >= 0).nonzero()[:, 0]
        move(
            self.pool.data,
            self.layout,
            self._place(table_rows[chosen], after[chosen]),
            self._place(table_rows[chosen], slot[chosen]),
        )
        self._shorten(table_rows, length, after, total, longest)

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Replace the sequences by source[0], source[1], ...: beams, repeats, a smaller batch.

        Raises:
            PoolExhausted: too few pages for the copies, including those released.
            ValueError: a sequence does not exist, none is named, or the store shares its table.
        """
        if self._facing is not None:
            raise ValueError("two stores share a page table; select both, as Tiers.select does")
        select_all((self,), source)

    def expect_tokens(
        self, key: Tensor, value: Tensor, score: Tensor | None, position: Tensor | None, *shape: int
    ) -> None:
        """Raise if tokens do not match the layout.

        Raises:
            ValueError: shapes do not match, or scores or positions are missing or not stored here.
        """
        expect_shape("key", key, *shape, self.layout.format.key.dim)
        expect_shape("value", value, *shape, self.layout.format.value.dim)
        expect_field("score", score, self.layout.scores, *shape)
        expect_field("position", position, self.layout.positions, *shape)

    def expect_source(self, source: PagedTokens, table_rows: int) -> None:
        """Raise if stored tokens do not match the layout.

        Raises:
            ValueError: other numbers of rows, dimensions that differ, or scores or positions that
                are stored only here.
        """
        mine, other = self.layout, source.layout
        if source.table.shape[:2] != (table_rows, 1):
            raise ValueError(
                f"the source has {source.table.shape[0]} rows of {source.table.shape[1]} heads for "
                f"{table_rows} table rows; give one row of one head for each"
            )
        dims, others = ((each.format.key.dim, each.format.value.dim) for each in (mine, other))
        if dims != others:
            raise ValueError(
                f"the source has keys and values of {others} dimensions; {dims} are stored here"
            )
        if (mine.scores and not other.scores) or (mine.positions and not other.positions):
            raise ValueError(
                "scores or positions are stored here and not in the source; use a source with both"
            )

    def _view(
        self,
        table: Int[Tensor, "B H T"],
        length: Int[Tensor, "B H"],
        data: UInt8[Tensor, "P nbytes"],
        tiles: TileCounts | None = None,
    ) -> PagedTokens:
        return PagedTokens(
            data,
            table,
            length,
            self.layout,
            reverse=self._table.reverse,
            holes=self.in_blocks and self.layout.positions,
            longest=self.longest,
            tiles=tiles,
        )

    def _fetch(self, table_rows: Tensor, slot: Tensor) -> Stored:
        block = self.layout.format.block
        page, row = self._place(table_rows[:, None], slot.clamp(min=0)[:, None])

        def take_one(segment: Segment) -> Tensor:
            # Scores and positions have a row per token, the parts of the format one per block.
            at = row if segment.rows == self.layout.tokens else row // block
            return take(self.pool.data, segment, page, at)

        inside = row[:, 0] % block if block > 1 else None
        return read_tokens(self.layout, (slot >= 0)[:, None], take_one, BOTH, inside)

    def _weakest(
        self, table_rows: Tensor, slots: int, until: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._expect_scores()
        if until is not None:
            self._expect_positions()
        return self.kernels.weakest(self.whole(), table_rows, slots, until)

    def _expect_scores(self) -> None:
        if not self.layout.scores:
            raise ValueError("pages of this layout store no scores; use a layout with scores=True")

    def _expect_positions(self) -> None:
        if not self.layout.positions:
            raise ValueError(
                "pages of this layout store no positions; use a layout with positions=True"
            )

    def _agree_slots(
        self, wrong: Tensor, slot: Tensor, length: Tensor, *values: Tensor
    ) -> list[int]:
        empty = (slot < -1) | (slot >= length)
        strange, *known = self._agree(wrong, empty.sum(), *values)
        if strange:
            first = int(empty.int().argmax())
            raise ValueError(
                f"slot {int(slot[first])} holds no token, the table row has {int(length[first])}; "
                "name a slot before that, or -1 to leave the table row unchanged"
            )
        return known

    def _compact(
        self, table_rows: Tensor, length: Tensor, wrong: Tensor, stay: Tensor, block: int
    ) -> int:
        """Evict the blocks of `block` slots that are not marked; the last ones fill the gaps.

        Returns:
            The number of pages returned to the pool.
        """
        after = stay.sum(1) * block
        freed = (self._pages_for(length) - self._pages_for(after)).sum()
        longest, total, remains = self._agree(
            wrong, most(length), freed, self._longest_if(table_rows, after)
        )
        expect_cover("keep", stay.shape[1] * block, longest)
        ends = torch.arange(stay.shape[1], device=stay.device) < stay.sum(1, keepdim=True)
        self.own(table_rows, (ends & ~stay).repeat_interleave(block, 1))  # the gaps that are filled
        self.kernels.compact(self.whole(), table_rows, stay)
        self._shorten(table_rows, length, after, total, remains)
        return total


def read_slots(
    store: TokenStore,
    table_rows: Int[Tensor, " S"],
    slot: Int[Tensor, "S L"],
    vectors: VectorNames = BOTH,
) -> Stored:
    """Read the tokens in slots of table rows; unlike `TokenStore.fetch`, without checks.

    Args:
        store: of a format that encodes each token separately.
        table_rows: the table rows; may repeat.
        slot: slots of each table row, before its end.
        vectors: the vectors to decode.
    """
    if slot.shape[1] == 1:
        return store.kernels.read(store.whole(), table_rows, 1, vectors, slot[:, 0])
    page, row = store._place(table_rows[:, None].expand_as(slot), slot)

    def take_each(segment: Segment) -> Tensor:
        return take(store.pool.data, segment, page, row)

    return read_tokens(store.layout, slot >= 0, take_each, vectors)


def write_slots(
    store: TokenStore,
    table_rows: Int[Tensor, " S"],
    slot: Int[Tensor, "S L"],
    some: Bool[Tensor, "S L"],
    key: Float[Tensor, "S L D"],
    value: Float[Tensor, "S L Dv"],
    score: Float[Tensor, "S L"] | None = None,
    position: Int[Tensor, "S L"] | None = None,
) -> None:
    """Overwrite the tokens in the marked slots; unlike `TokenStore.replace`, without checks.

    Args:
        store: of a format that encodes each token separately.
        table_rows: the table rows.
        slot: slots of each table row, before its end; marked ones are unique.
        some: the slots to write; the others are redirected to the pool's scratch page.
        key: of the tokens.
        value: of the tokens.
        score: of the tokens; None keeps the stored scores.
        position: of the tokens; None keeps the stored positions.
    """
    store.own(table_rows)
    if store.bounds is not None:
        store.bounds.forget(table_rows)
    beside = (score is not None, position is not None)
    whole = beside == (store.layout.scores, store.layout.positions)
    # The kernels in torch list the marked ones, for which a device would be waited for.
    if slot.shape[1] == 1 and whole and store.kernels is not torch_kernels:
        tokens = TokenWrite(table_rows, slot[:, 0], some, key, value, score, position)
        store.kernels.write(store.whole(), tokens)
        return
    page, row = store._place(table_rows[:, None].expand_as(slot), slot)
    write_tokens(
        store.pool.padded,
        store.layout,
        page.where(some, store.pool.capacity).flatten(),
        row.flatten(),
        key.flatten(0, 1),
        value.flatten(0, 1),
        None if score is None else score.flatten(),
        None if position is None else position.flatten(),
    )


def held_of(source: PagedTokens, keep: Bool[Tensor, "S L"]) -> Bool[Tensor, "S slots"]:
    """Return the marks of slots before the ends of rows, in the columns that their table covers.

    Raises:
        ValueError: there is not one row of marks for each of the source.
    """
    expect_shape("keep", keep, source.table.shape[0], None)
    keep = keep[:, : source.table.shape[2] * source.layout.tokens]
    return keep & before(source.length[:, 0], keep.shape[1])


def _at(slot: Int[Tensor, " S"], slots: int) -> Bool[Tensor, "S slots"]:
    """Return which of the slots is named for each row; none for -1."""
    return torch.arange(slots, device=slot.device) == slot[:, None]


def most(length: Int[Tensor, " S"]) -> Int[Tensor, ""]:
    """Return the largest length, 0 if there are no lengths."""
    return length.amax() if length.numel() else length.new_zeros(())
