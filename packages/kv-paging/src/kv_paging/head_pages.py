"""Rows of slots over a pool: which pages each holds and how many slots, whatever is stored in them.

Sequences are selected, joined and released here in several stores at once, as the stores of a cache
share a pool, and two may share a page table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging.checks import expect_shape, expect_within
from kv_paging.kernels import select_page_kernels
from kv_paging.pool import PagePool
from kv_paging.table import PageTable, pages_for, spread
from kv_policy import PageLayout

_ALL: Final = slice(None)


@dataclass(slots=True)
class Lengths:
    """How long table rows are, which a store shares with the one that faces it in a page table.

    The two know each other by this alone: were each to hold the other, their pages would wait for
    the garbage collector.
    """

    length: Int[Tensor, "N B H"]
    tokens: int  # in a page

    def pages(self) -> Int[Tensor, " S"]:
        """Count the pages of each table row."""
        return pages_for(self.length.flatten().long(), self.tokens)


class HeadPages:
    """A table row of slots per layer, sequence and KV head, each with a length of its own.

    Slot i of a row is slot i % tokens of the table row's page i // tokens. Operations take the ids
    of the table rows they are about, each named once, and work on all of them at once. What is
    refused, by PoolExhausted or otherwise, leaves everything as it was. Several stores, of
    different layouts, may share a pool, and two a page table.

    Here and in TokenStore, the host waits for the device where `_agree` reads the few numbers that
    an operation must know (how many pages, how long, whether the arguments are right): once an
    operation. select, clear and truncate wait once more to check sequences; append, replace and
    remove once more, and compact twice, to list tokens with `nonzero`. Nothing else waits: what
    works on a layer or on all table rows (`read_layer`, `weakest_all`, ...) goes by `longest`.
    """

    in_blocks: ClassVar[bool] = False  # whether tokens that are encoded together can be stored

    def __init__(
        self,
        pool: PagePool,
        layout: PageLayout,
        layers: int,
        sequences: int,
        heads: int,
        *,
        facing: "HeadPages | None" = None,
    ) -> None:
        """Start with empty table rows; they hold no page.

        Args:
            pool: where pages come from.
            layout: how a page holds tokens.
            layers: N.
            sequences: B.
            heads: H.
            facing: a store of as many rows; this one's pages are counted from the right of its
                page table. Such stores are selected together, by `select_all`.

        Raises:
            ValueError: the layout's pages are not the pool's, its codecs take several tokens at
                a time, or there would be no table row.
        """
        if layout.nbytes != pool.page_bytes:
            raise ValueError(
                f"the layout is for pages of {layout.nbytes} bytes and the pool's have "
                f"{pool.page_bytes}; lay it out with PageLayout.fitted(format, {pool.page_bytes})"
            )
        if layout.format.block != 1 and not self.in_blocks:
            raise ValueError(
                f"the format stores {layout.format.block} tokens at a time; only formats in which "
                "every token stands alone can be stored here, others as a tier of Tiers"
            )
        if min(layers, sequences, heads) < 1:
            raise ValueError(
                f"{layers} layers, {sequences} sequences and {heads} heads make no table row; give "
                "at least 1 of each"
            )
        self.pool = pool
        self.layout = layout
        self.kernels = select_page_kernels(layout, pool.device, pool.kernels)
        none = torch.zeros(layers, sequences, heads, dtype=torch.int32, device=pool.device)
        self._held = Lengths(none, layout.tokens)
        self._longest = 0
        self._changes = 0
        self._facing = None if facing is None else facing._held
        if facing is None:
            self._table = PageTable(self._length.numel(), pool.device)
        else:
            self._table, facing._facing = facing._table.facing(), self._held

    @property
    def _length(self) -> Int[Tensor, "N B H"]:
        return self._held.length

    @_length.setter
    def _length(self, length: Int[Tensor, "N B H"]) -> None:
        self._held.length = length

    @property
    def table(self) -> Int[Tensor, "N B H T"]:
        """Page ids, int32; what stands past a table row's last page means nothing."""
        return self._table.ids.view(*self._length.shape, self._table.width)

    @property
    def length(self) -> Int[Tensor, "N B H"]:
        """Slots in each table row, int32: its tokens, and holes where there are any."""
        return self._length

    @property
    def live(self) -> Int[Tensor, "N B H"]:
        """Tokens in each table row."""
        return self._length.long()

    @property
    def longest(self) -> int:
        """No table row has more slots, as far as the host knows: exact after what waits anyway."""
        return min(self._longest, self._table.width * self.layout.tokens)

    @property
    def changes(self) -> int:
        """A number that changes with the lengths, except by `Tiers.step`."""
        return self._changes

    @property
    def pages_used(self) -> int:
        """Pages the table rows hold; the host waits for the device."""
        return int(self._pages_for(self._length).sum())

    @property
    def table_bytes(self) -> int:
        """Memory of page tables and lengths; a shared table counts where its left side is."""
        own = 0 if self._table.reverse else self._table.nbytes
        return own + self._length.numel() * self._length.itemsize

    def pages(self) -> Int[Tensor, " n"]:
        """Give the ids of all pages the table rows hold; for `PagePool.check`."""
        return self._table.within(self.held_pages())

    def held_pages(self) -> Int[Tensor, " S"]:
        """Count the pages of each table row."""
        return self._held.pages()

    def sequence_pages(self) -> Int[Tensor, " B"]:
        """Count the pages of each sequence over all layers and heads, without waiting."""
        return self._pages_for(self._length.long()).sum((0, 2))

    def table_rows(self, layers: slice = _ALL) -> Int[Tensor, " S"]:
        """Give the ids of the table rows of some layers: ((layer * B) + sequence) * H + head."""
        ids = torch.arange(self._length.numel(), device=self.pool.device)
        return ids.view(self._length.shape)[layers].flatten()

    def pages_for_more(self, count: Int[Tensor, " S"]) -> Int[Tensor, ""]:
        """Count the pages that so many more tokens of all table rows take."""
        length = self._length.flatten().long()
        return (self._pages_for(length + count) - self._pages_for(length)).sum()

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Let finished sequences give all their pages back; they go on as empty ones.

        Raises:
            ValueError: a sequence that does not exist, or is named twice.
        """
        layers, every, heads = self._length.shape
        expect_within("sequence", sequences, every - 1)
        table_rows = self.table_rows().view(layers, every, heads)[:, sequences].flatten()
        table_rows, length, wrong = self._named(table_rows)
        after = torch.zeros_like(length)
        freed, longest = self._agree(
            wrong, self._pages_for(length).sum(), self._longest_if(table_rows, after)
        )
        self._shorten(table_rows, length, after, freed, longest)

    def truncate(self, length: Int[Tensor, " B"]) -> None:
        """Let each head of sequence b keep its first length[b] slots at most.

        These are the oldest tokens as long as tokens were only appended.

        Raises:
            ValueError: a negative length, or not one for each sequence.
        """
        self.expect_lengths(length)
        self.cut(length[:, None].expand_as(self._length))

    def cut(self, length: Int[Tensor, "N B H"]) -> None:
        """Let every table row keep its first slots, so many at most."""
        before = self._length.flatten().long()
        after = before.minimum(length.flatten().long())
        lost = (self._pages_for(before) - self._pages_for(after)).sum()
        freed, longest = torch.stack((lost, after.amax())).tolist()
        self._shorten(self.table_rows(), before, after, freed, longest)

    def expect_lengths(self, length: Int[Tensor, "*B"]) -> None:
        """Refuse what are not lengths of all sequences.

        Raises:
            ValueError: a negative length, or not one for each sequence.
        """
        expect_shape("length", length, self._length.shape[1])
        if (length < 0).any():
            raise ValueError(f"length is {length.tolist()}; a sequence keeps 0 tokens or more")

    @property
    def page_table(self) -> PageTable:
        """The table itself; its rows are the table rows."""
        return self._table

    def set_longest(self, longest: int) -> None:
        """Set the bound of lengths."""
        self._longest = longest

    def _pages_for(self, length: Tensor) -> Tensor:
        return pages_for(length, self.layout.tokens)

    def _named(self, table_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give safe ids, the table rows' lengths, and how many ids are repeated or do not exist."""
        every = self._length.numel()
        safe = table_rows.clamp(0, every - 1)
        mark = torch.zeros(every, dtype=torch.bool, device=self.pool.device)
        mark[safe] = True
        wrong = (safe != table_rows).sum() + table_rows.shape[0] - mark.sum()
        return safe, self._length.view(-1)[safe].long(), wrong

    def _agree(self, wrong: Tensor, *values: Tensor) -> list[int]:
        """Read what the host must know, all at once: here the host waits for the device."""
        bad, *known = torch.stack((wrong, *values)).tolist()
        if bad:
            raise ValueError(
                "a row is named twice or does not exist; name each at most once, with ids from "
                f"0 to {self._length.numel() - 1}"
            )
        return [int(value) for value in known]

    def _longest_if(self, table_rows: Tensor, after: Tensor) -> Tensor:
        """Give the largest length there will be once table rows have the length `after`."""
        return self._length.flatten().long().scatter(0, table_rows, after).amax()

    def _columns_if(self, table_rows: Tensor, needed: Tensor) -> Tensor:
        """Give the columns the table must have once table rows hold `needed` pages."""
        if self._facing is not None:
            needed = needed + self._facing.pages()[table_rows]
        return needed.amax() if needed.numel() else needed.new_zeros(())

    def widen(self, columns: int) -> None:
        """Make room in the page table for `columns` pages of every row, both sides together."""
        if self._facing is None:
            self._table.widen(columns)
            return
        left = self._facing if self._table.reverse else self._held
        self._table.widen(columns, left.pages())

    def _enter(
        self, table_rows: Tensor, held: Tensor, extra: Tensor, pages: Tensor, columns: int
    ) -> None:
        """Deal out pages to table rows, `extra` to each after those held; the lengths stay.

        Until a length is set nobody sees the new slots, so this can be given up half-way.
        """
        self.widen(columns)
        row, column = spread(held, extra, pages.shape[0])
        self._table.enter(table_rows[row], column, pages)

    def _reorder(self, rows: Tensor, source: Tensor) -> None:
        """Let table row i have the pages of rows[i], and sequence b the lengths of source[b]."""
        if not self._table.reverse:  # the right side goes with the left
            self._table.reorder(rows)
        self._length = self._length[:, source].contiguous()
        self._changes += 1

    def _join(self, other: "HeadPages") -> None:
        """Let the other's sequences come after these, in every layer; it has none then."""
        longest = max(self.longest, other.longest)
        if not self._table.reverse:  # the right side goes with the left
            left = (self.held_pages(), other.held_pages())
            self._table.join(other._table, len(self._length), left if self._facing else None)
        self._length = torch.cat((self._length, other._length), 1)
        self._longest = longest
        self._changes += 1
        other._empty()

    def _empty(self) -> None:
        """Have no sequence; what pages there were are free, or belong to others."""
        if not self._table.reverse:
            self._table.reorder(self.table_rows()[:0])
        self._length = self._length[:, :0].contiguous()
        self._longest = 0
        self._changes += 1

    def _copy(self, count: Tensor, total: int) -> None:
        """Give each table row copies of its first `count` pages, instead of those it has."""
        table_row, column = spread(torch.zeros_like(count), count, total)
        pages = self.pool.allocate(total)
        source = self._table.lookup(table_row, column)
        self.kernels.copy_pages(self.pool.data, source, pages)
        self._table.enter(table_row, column, pages)

    def _shorten(
        self, table_rows: Tensor, before: Tensor, after: Tensor, freed: int, longest: int
    ) -> None:
        """Give back the pages past the new ends, `freed` in all, and set the lengths."""
        first = self._pages_for(after)
        row, column = spread(first, self._pages_for(before) - first, freed)
        self.pool.release(self._table.lookup(table_rows[row], column))
        self._set_length(table_rows, after, longest)

    def _set_length(self, table_rows: Tensor, length: Tensor, longest: int) -> None:
        self._length.view(-1)[table_rows] = length.to(self._length.dtype)
        self._longest = longest
        self._changes += 1

    def _place(self, table_rows: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Give the page, and the row inside it, of a slot of each table row."""
        size = self.layout.tokens
        return self._table.lookup(table_rows, slot // size), slot % size


def join_all(mine: Sequence[HeadPages], theirs: Sequence[HeadPages]) -> None:
    """Let their sequences come after mine in every layer, store by store; they have none then.

    Pages change their owner and nothing else: no byte of one moves, and nothing waits for the
    device. What costs time are the page tables, which are laid side by side.

    Raises:
        ValueError: what `expect_joined` refuses; nothing has changed.
    """
    expect_joined(mine, theirs)
    for store, other in zip(mine, theirs, strict=True):
        store._join(other)


def expect_joined(mine: Sequence[HeadPages], theirs: Sequence[HeadPages]) -> None:
    """Refuse stores whose sequences cannot become sequences of others.

    Raises:
        ValueError: the same stores, another pool, other layouts, or other layers or heads.
    """
    if len(mine) != len(theirs):
        raise ValueError(
            f"{len(theirs)} stores cannot join {len(mine)}; both sides need the same tiers"
        )
    for store, other in zip(mine, theirs, strict=True):
        if store is other:
            raise ValueError("sequences cannot join themselves; name other tiers over the pool")
        if store.pool is not other.pool:
            raise ValueError(
                "the pages lie in two pools, and joining copies none; make both over one pool"
            )
        if type(store) is not type(other) or store.layout != other.layout:
            raise ValueError(
                f"pages laid out as {other.layout} cannot join pages laid out as {store.layout}; "
                "both sides must be laid out alike"
            )
        (layers, _, heads), (others, _, more) = store.length.shape, other.length.shape
        if (layers, heads) != (others, more):
            raise ValueError(
                f"{others} layers of {more} heads cannot join {layers} layers of {heads} heads; "
                "both sides need the same"
            )


def expect_some(stores: Sequence[HeadPages]) -> None:
    """Refuse to go on where there is no sequence.

    Raises:
        ValueError: all were released, or have joined others.
    """
    if not stores[0].length.shape[1]:
        raise ValueError(
            "no sequence is left here: all were released, or have joined others; go on with those, "
            "or let new ones join"
        )


def release_all(stores: Sequence[HeadPages]) -> None:
    """Let all sequences of stores over one pool go; their pages are free, and no sequence is left.

    The host waits for the device once.
    """
    held = [store.held_pages() for store in stores]
    for store, count, total in zip(
        stores, held, torch.stack([each.sum() for each in held]).tolist(), strict=True
    ):
        store.pool.release(store.page_table.within(count, total))
    for store in stores:
        store._empty()


def select_all(stores: Sequence[HeadPages], source: Int[Tensor, " B2"]) -> None:
    """Let the sequences become source[0], source[1], ... in all stores over one pool, or in none.

    The stores have the same sequences, and layers and heads of their own. A sequence named for the
    first time keeps its pages, one named again gets copies of them, and one not named gives them
    back. The number of sequences becomes B2.

    Raises:
        PoolExhausted: too few pages for the copies, those given back counted in.
        ValueError: a sequence that does not exist, or none.
    """
    pool, sequences = stores[0].pool, stores[0].length.shape[1]
    if source.numel() == 0:
        raise ValueError("no sequence is selected; name at least one, or release all of them")
    expect_some(stores)
    expect_within("sequence", source, sequences - 1)
    order = torch.arange(source.shape[0], device=source.device)
    again = (source[:, None] == source).int().argmax(1) < order
    gone = torch.ones(sequences, dtype=torch.bool, device=source.device)
    gone[source] = False
    held = [store.held_pages().view(store.length.shape) for store in stores]
    lost = [(each * gone[:, None]).flatten() for each in held]
    copied = [(each[:, source] * again[:, None]).flatten() for each in held]
    known = torch.stack([each.sum() for each in (*lost, *copied)]).tolist()
    back, needed = known[: len(stores)], known[len(stores) :]
    pool.reserve(sum(needed) - sum(back))  # the only step that can fail
    for store, count, total in zip(stores, lost, back, strict=True):
        pool.release(store._table.within(count, total))
    for store in stores:
        rows = store.table_rows().view(store.length.shape)[:, source].flatten()
        store._reorder(rows, source)
    for store, count, total in zip(stores, copied, needed, strict=True):
        store._copy(count, total)


def move_together(pool: PagePool, stores: Sequence[HeadPages], free: int) -> None:
    """Shrink a pool whose pages these stores hold until so many are free, and tell their tables.

    Raises:
        ValueError: the pool may not grow.
        RuntimeError: somebody else holds pages of the pool; nothing has changed.
    """
    ids = pool.shrink(torch.cat([store.pages() for store in stores]), free)
    for store in stores:
        if not store.page_table.reverse:  # the right side goes with the left
            store.page_table.rename(ids)
