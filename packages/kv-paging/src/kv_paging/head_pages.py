"""Table rows of slots over a pool: the pages and the length of each, for any token format.

Sequences are selected, joined and released here in several stores at once, because the stores of a
cache share a pool, and two may share a page table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from kv_paging.checks import expect_shape, expect_within
from kv_paging.kernels import select_page_kernels
from kv_paging.key_bounds import KeyBounds
from kv_paging.owners import repeated
from kv_paging.pool import PagePool
from kv_paging.table import PageTable, pages_for, spread
from kv_policy import PageLayout, TileCounts

_ALL: Final = slice(None)


@dataclass(slots=True)
class Lengths:
    """The lengths of table rows, shared with the store at the other end of the page table.

    The two stores share only this object: mutual references would keep their pages alive until the
    garbage collector runs.
    """

    length: Int[Tensor, "N B H"]
    tokens: int  # per page

    def pages(self) -> Int[Tensor, " S"]:
        """Return the number of pages of each table row."""
        return pages_for(self.length.flatten().long(), self.tokens)


class HeadPages:
    """A table row of slots per layer, sequence and KV head, each with a separate length.

    Slot i of a row is slot i % tokens of the table row's page i // tokens. Operations take the ids
    of their table rows, each named once, and process all of them together. If an operation raises,
    PoolExhausted or another exception, nothing has changed. Several stores, of different layouts,
    may share a pool, and two a page table.

    Here and in TokenStore, the host synchronizes with the device in `_agree`, which reads the few
    numbers that an operation must know (number of pages, lengths, validity of the arguments): once
    per operation. select, clear and truncate synchronize once more to check sequences; append,
    replace and remove once more, and compact twice, to list tokens with `nonzero`. Nothing else
    synchronizes: operations on a layer or on all table rows (`read_layer`, `weakest_all`, ...) use
    `longest`.
    """

    in_blocks: ClassVar[bool] = False  # whether block-encoded tokens can be stored

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
        """Create empty table rows; they hold no page.

        Args:
            pool: the pool of the pages.
            layout: the page layout.
            layers: N.
            sequences: B.
            heads: H.
            facing: a store of as many rows; this store's pages are counted from the right of its
                page table. Such stores are selected together, by `select_all`.

        Raises:
            ValueError: the layout's page size differs from the pool's, its codecs encode several
                tokens together, or there would be no table row.
        """
        if layout.nbytes != pool.page_bytes:
            raise ValueError(
                f"the layout is for pages of {layout.nbytes} bytes and the pool's have "
                f"{pool.page_bytes}; use PageLayout.fitted(format, {pool.page_bytes})"
            )
        if layout.format.block != 1 and not self.in_blocks:
            raise ValueError(
                f"the format encodes {layout.format.block} tokens together; this store needs a "
                "format that encodes each token separately; use others as a tier of Tiers"
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
        self._ids = torch.empty(0, dtype=torch.long, device=pool.device)  # of all table rows
        self._tiles: TileCounts | None = None
        self._bounds: KeyBounds | None = None
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
        """Page ids, int32; entries past a table row's last page are undefined."""
        return self._table.ids.view(*self._length.shape, self._table.width)

    @property
    def length(self) -> Int[Tensor, "N B H"]:
        """Slots in each table row, int32: its tokens, and its holes."""
        return self._length

    @property
    def live(self) -> Int[Tensor, "N B H"]:
        """Tokens in each table row."""
        return self._length.long()

    @property
    def longest(self) -> int:
        """An upper bound of the slots per table row; exact after operations that synchronize."""
        return min(self._longest, self._table.width * self.layout.tokens)

    @property
    def bounds(self) -> KeyBounds | None:
        """The bounds of the keys in full pages, if they are kept."""
        return self._bounds

    def keep_bounds(self, coded: bool = False) -> None:
        """Keep bounds of the keys in full pages, or codes of them; `KeyBounds.update` computes."""
        self._bounds = KeyBounds(self._length.numel(), self.layout, self.pool.device, coded)

    @property
    def changes(self) -> int:
        """A number that changes with the lengths, except by `Tiers.step`."""
        return self._changes

    @property
    def pages_used(self) -> int:
        """Pages held by the table rows; synchronizes with the device."""
        return int(self._pages_for(self._length).sum()) - self.pages_repeated

    @property
    def pages_repeated(self) -> int:
        """Pages of table rows that other rows hold, too; each counts once less than its rows."""
        return len(repeated(self.pages())) if self.pool.shares else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of page tables, lengths and ids; a shared table is counted by its left store."""
        own = 0 if self._table.reverse else self._table.nbytes
        tiles = [] if self._tiles is None else self._tiles.counted.values()
        return own + sum(x.numel() * x.itemsize for x in (self._length, self._ids, *tiles))

    def pages(self) -> Int[Tensor, " n"]:
        """Return the ids of all pages held by the table rows; for `PagePool.check`."""
        return self._table.within(self.held_pages())

    def own(
        self,
        table_rows: Int[Tensor, " S"] | None = None,
        slots: Bool[Tensor, "S L"] | None = None,
    ) -> None:
        """Copy pages that several table rows hold, so that each row can write to its own.

        Synchronizes with the device if the pool shares pages.

        Args:
            table_rows: the rows that write; None: all.
            slots: the slots that they write; None: all of theirs.

        Raises:
            PoolExhausted: too few pages for the copies; nothing has changed.
        """
        if not self.pool.shares:
            return
        held = self.held_pages()
        rows = self.table_rows() if table_rows is None else table_rows
        if slots is None:
            count = held[rows]
            row, column = spread(torch.zeros_like(count), count, int(count.sum()))
        else:
            tokens = self.layout.tokens
            whole = pad(slots, (0, -slots.shape[1] % tokens)).view(len(slots), -1, tokens).any(-1)
            inside = torch.arange(whole.shape[1], device=whole.device) < held[rows][:, None]
            row, column = (whole & inside).nonzero().unbind(1)
        row = rows[row]
        source = self._table.lookup(row, column)
        again = self.pool.to_copy(source).nonzero()[:, 0]
        row, column, source = row[again], column[again], source[again]
        pages = self.pool.allocate(len(again))
        self.kernels.copy_pages(self.pool.data, source, pages)
        self._table.enter(row, column, pages)
        self.pool.release(source)

    def held_pages(self) -> Int[Tensor, " S"]:
        """Return the number of pages of each table row."""
        return self._held.pages()

    def sequence_pages(self) -> Int[Tensor, " B"]:
        """Return the pages of each sequence over all layers and heads, without synchronizing."""
        return self._pages_for(self._length.long()).sum((0, 2))

    def shared_pages(self) -> Int[Tensor, " B"]:
        """Count each sequence's pages that other rows hold, too.

        Synchronizes with the device if the pool shares pages.
        """
        lead = self._length.shape
        if not self.pool.shares or not lead[1]:
            return self._length.new_zeros(lead[1], dtype=torch.long)
        held = self.held_pages()
        row, column = spread(torch.zeros_like(held), held, int(held.sum()))
        shared = self.pool.shared(self._table.lookup(row, column)).long()
        return held.new_zeros(len(held)).index_add_(0, row, shared).view(lead).sum((0, 2))

    def table_rows(self, layers: slice = _ALL) -> Int[Tensor, " S"]:
        """Return the ids of the table rows of some layers: ((layer * B) + sequence) * H + head."""
        every = self._length.numel()
        if len(self._ids) != every:
            self._ids = torch.arange(every, device=self.pool.device)
        return self._ids.view(self._length.shape)[layers].flatten()

    def pages_for_more(self, count: Int[Tensor, " S"]) -> Int[Tensor, ""]:
        """Return the number of pages for `count` more tokens of all table rows."""
        length = self._length.flatten().long()
        return (self._pages_for(length + count) - self._pages_for(length)).sum()

    def fill(self, length: Int[Tensor, "N B H"]) -> None:
        """Give empty table rows the pages for these many slots, whose bytes are to be written.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow; nothing has changed.
            ValueError: other sizes, or a table row holds slots.
        """
        expect_shape("length", length, *self._length.shape)
        table_rows, after = self.table_rows(), length.flatten().long()
        needed = self._pages_for(after)
        held, total, columns, longest = torch.stack(
            (self._length.sum(), needed.sum(), self._columns_if(table_rows, needed), after.amax())
        ).tolist()
        if held:
            raise ValueError(f"the table rows hold {held} slots; fill empty ones")
        pages = self.pool.allocate(total)
        self._enter(table_rows, torch.zeros_like(needed), needed, pages, columns)
        self._set_length(table_rows, after, longest)

    def settle_longest(self) -> None:
        """Make `longest` exact; synchronizes with the device."""
        self._longest = int(self._length.amax()) if self._length.numel() else 0

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Return all pages of finished sequences to the pool; the sequences remain, empty.

        Raises:
            ValueError: a sequence does not exist or is named twice.
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
        """Truncate each head of sequence b to at most its first length[b] slots.

        These are the oldest tokens if tokens have only been appended.

        Raises:
            ValueError: a negative length, or not one length per sequence.
        """
        self.expect_lengths(length)
        self.cut(length[:, None].expand_as(self._length))

    def cut(self, length: Int[Tensor, "N B H"]) -> None:
        """Truncate every table row to at most its first `length` slots."""
        self.own()  # the last page is written to again
        before = self._length.flatten().long()
        after = before.minimum(length.flatten().long())
        lost = (self._pages_for(before) - self._pages_for(after)).sum()
        freed, longest = torch.stack((lost, after.amax())).tolist()
        self._shorten(self.table_rows(), before, after, freed, longest, in_place=True)

    def take_back(self, table_rows: Int[Tensor, " S"], length: Int[Tensor, " S"]) -> None:
        """Remove the slots that were appended to table rows since they had these lengths.

        Unlike `cut`, it copies no page that other rows hold, too: a row has written to its last one
        already.
        """
        table_rows, before, wrong = self._named(table_rows)
        after = before.minimum(length.long())
        lost = (self._pages_for(before) - self._pages_for(after)).sum()
        freed, longest = self._agree(wrong, lost, self._longest_if(table_rows, after))
        self._shorten(table_rows, before, after, freed, longest, in_place=True)

    def lengths_of(self, table_rows: Int[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Return a copy of the lengths of table rows."""
        return self._length.view(-1)[table_rows].long()

    def expect_lengths(self, length: Int[Tensor, "*B"]) -> None:
        """Raise if these are not lengths of all sequences.

        Raises:
            ValueError: a negative length, or not one length per sequence.
        """
        expect_shape("length", length, self._length.shape[1])
        if (length < 0).any():
            raise ValueError(f"length is {length.tolist()}; a sequence keeps 0 tokens or more")

    @property
    def page_table(self) -> PageTable:
        """Return the page table; its rows are the table rows."""
        return self._table

    def set_longest(self, longest: int) -> None:
        """Set the upper bound of lengths, which a step changes."""
        self._longest = longest
        self._tiles = None

    def _pages_for(self, length: Tensor) -> Tensor:
        return pages_for(length, self.layout.tokens)

    def _named(self, table_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return safe ids, the table rows' lengths, and the number of repeated or invalid ids."""
        every = self._length.numel()
        safe = table_rows.clamp(0, every - 1)
        mark = torch.zeros(every, dtype=torch.bool, device=self.pool.device)
        mark[safe] = True
        wrong = (safe != table_rows).sum() + table_rows.shape[0] - mark.sum()
        return safe, self._length.view(-1)[safe].long(), wrong

    def _agree(self, wrong: Tensor, *values: Tensor) -> list[int]:
        """Read the numbers that the host must know; this synchronizes with the device once."""
        bad, *known = torch.stack((wrong, *values)).tolist()
        if bad:
            raise ValueError(
                "a row is named twice or does not exist; name each at most once, with ids from "
                f"0 to {self._length.numel() - 1}"
            )
        return [int(value) for value in known]

    def _longest_if(self, table_rows: Tensor, after: Tensor) -> Tensor:
        """Return the maximum length after `table_rows` get the lengths `after`."""
        return self._length.flatten().long().scatter(0, table_rows, after).amax()

    def _columns_if(self, table_rows: Tensor, needed: Tensor) -> Tensor:
        """Return the columns of the table required if `table_rows` hold `needed` pages."""
        if self._facing is not None:
            needed = needed + self._facing.pages()[table_rows]
        return needed.amax() if needed.numel() else needed.new_zeros(())

    def widen(self, columns: int) -> None:
        """Widen the page table to `columns` pages per row, both sides together."""
        if self._facing is None or columns <= self._table.width:
            self._table.widen(columns)
            return
        left = self._facing if self._table.reverse else self._held
        self._table.widen(columns, left.pages())

    def _enter(
        self, table_rows: Tensor, held: Tensor, extra: Tensor, pages: Tensor, columns: int
    ) -> None:
        """Append `extra` pages to each table row after those held; the lengths are unchanged.

        The new slots are invisible until a length is set, so this can be abandoned half-way.
        """
        self.widen(columns)
        row, column = spread(held, extra, pages.shape[0])
        self._table.enter(table_rows[row], column, pages)

    def _reorder(self, rows: Tensor, source: Tensor) -> None:
        """Assign pages of rows[i] to table row i, and lengths of source[b] to sequence b."""
        if not self._table.reverse:  # the right side is reordered with the left
            self._table.reorder(rows)
        if self._bounds is not None:
            self._bounds.reorder(rows)
        self._length = self._length[:, source].contiguous()
        self._note_change()

    def _join(self, other: "HeadPages") -> None:
        """Append the other's sequences in every layer; the other has none afterwards."""
        longest = max(self.longest, other.longest)
        lead, others = self._length.shape, other._length.shape
        if not self._table.reverse:  # the right side is joined with the left
            left = (self.held_pages(), other.held_pages())
            self._table.join(other._table, len(self._length), left if self._facing else None)
        self._length = torch.cat((self._length, other._length), 1)
        self._longest = longest
        if self._bounds is not None and other._bounds is not None:
            self._bounds.join(other._bounds, lead, others)
        self._note_change()
        other._empty()

    def _adopt(self, sequence: int, other: "HeadPages") -> None:
        """Let an empty sequence have the pages of the other's only one, in place."""
        longest, lead = max(self.longest, other.longest), self._length.shape
        self._forget_bounds()
        if not self._table.reverse:  # the right side changes with the left
            left = other.held_pages() if self._facing else None
            self._table.adopt(sequence, other._table, (lead[0], lead[1], lead[2]), left)
        self._length[:, sequence] = other._length[:, 0]
        self._longest = longest
        self._note_change()
        other._empty()

    def _branch(
        self,
        sequence: int,
        other: "HeadPages",
        full: Tensor,
        copied: Tensor,
        joint: int,
        total: int,
    ) -> None:
        """Give the other's only sequence the first `full` pages, and copies of the next `copied`.

        `joint` and `total` are the sums of both.
        """
        rows = self.table_rows().view(self._length.shape)[:, sequence].flatten()
        if not other._table.reverse:  # the right side is given with the left
            other._table.take(self._table, rows)
        other._length = self._length[:, sequence : sequence + 1].clone()
        if self._bounds is not None and other._bounds is not None:
            self._bounds.branch(other._bounds, rows)
        if joint:
            self.pool.share(other._table.within(full, joint))
        if total:
            other._copy(full, copied, total)
        other._longest = self.longest
        other._note_change()

    def _empty(self) -> None:
        """Remove all sequences; their pages are free, or belong to other stores."""
        self._forget_bounds()
        if not self._table.reverse:
            self._table.reorder(self.table_rows()[:0])
        self._length = self._length[:, :0].contiguous()
        self._longest = 0
        self._note_change()

    def _copy(self, first: Tensor, count: Tensor, total: int) -> None:
        """Replace `count` pages of each table row, from column `first`, by copies."""
        table_row, column = spread(first, count, total)
        pages = self.pool.allocate(total)
        source = self._table.lookup(table_row, column)
        self.kernels.copy_pages(self.pool.data, source, pages)
        self._table.enter(table_row, column, pages)

    def _shorten(
        self,
        table_rows: Tensor,
        before: Tensor,
        after: Tensor,
        freed: int,
        longest: int,
        *,
        in_place: bool = False,
    ) -> None:
        """Release the pages past the new ends, `freed` in total, and set the lengths.

        With `in_place` the first slots still hold the tokens that they held; otherwise those of
        rows that are shorter may hold others.
        """
        if self._bounds is not None and in_place:
            self._bounds.cut(table_rows, after // self.layout.tokens)
        elif self._bounds is not None:
            self._bounds.forget(table_rows, after < before)
        first = self._pages_for(after)
        row, column = spread(first, self._pages_for(before) - first, freed)
        self.pool.release(self._table.lookup(table_rows[row], column))
        self._set_length(table_rows, after, longest)

    def _set_length(self, table_rows: Tensor, length: Tensor, longest: int) -> None:
        self._length.view(-1)[table_rows] = length.to(self._length.dtype)
        self._longest = longest
        self._note_change()

    def _forget_bounds(self) -> None:
        """Drop all bounds, which `KeyBounds.update` computes again."""
        if self._bounds is not None:
            self._bounds.clear(self._length.numel())

    def _note_change(self) -> None:
        """Note that lengths have changed, other than by a step."""
        self._changes += 1
        self._tiles = None

    def _place(self, table_rows: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the page of a slot of each table row, and the row inside it."""
        size = self.layout.tokens
        return self._table.lookup(table_rows, slot // size), slot % size


def join_all(mine: Sequence[HeadPages], theirs: Sequence[HeadPages]) -> None:
    """Append the sequences of `theirs` in every layer, store by store; they have none afterwards.

    Pages only change their owner: no bytes are copied, without synchronizing with the device. The
    cost is the concatenation of the page tables.

    Raises:
        ValueError: as `expect_joined`; nothing has changed.
    """
    expect_joined(mine, theirs)
    for store, other in zip(mine, theirs, strict=True):
        store._join(other)


def adopt_all(sequence: int, mine: Sequence[HeadPages], theirs: Sequence[HeadPages]) -> None:
    """Let an empty sequence have the pages of the only sequence of `theirs`, store by store.

    Pages only change their owner. Tables and lengths change in place, without synchronizing with
    the device; the columns of tables suffice.

    Raises:
        ValueError: as `expect_joined`; nothing has changed.
    """
    expect_joined(mine, theirs)
    for store, other in zip(mine, theirs, strict=True):
        store._adopt(sequence, other)


def branch_all(
    sequence: int,
    mine: Sequence[HeadPages],
    theirs: Sequence[HeadPages],
    shared: Sequence[HeadPages] = (),
    *,
    whole: bool = False,
) -> None:
    """Give the only sequence of `theirs`, which is empty, the tokens of one of `mine`, or none.

    In `shared` stores both hold the same full pages, and the last one, which is appended to, is
    copied; in others all pages are. With `whole` no page is copied: then one of the two must be
    released before either changes.

    Synchronizes with the device once.

    Raises:
        PoolExhausted: too few pages for the copies; nothing has changed.
        ValueError: as `expect_joined`, or the sequence does not exist.
    """
    expect_joined(mine, theirs)
    pool, sequences = mine[0].pool, mine[0].length.shape[1]
    if not 0 <= sequence < sequences:
        raise ValueError(f"sequence {sequence} does not exist; there are {sequences}")
    held, full = [], []
    for store in mine:
        length = store.length[:, sequence].flatten().long()
        held.append(pages_for(length, store.layout.tokens))
        if whole:
            full.append(held[-1])
        elif any(store is each for each in shared):
            full.append(length // store.layout.tokens)
        else:
            full.append(torch.zeros_like(length))
    copied = [each - first for each, first in zip(held, full, strict=True)]
    known = torch.stack([each.sum() for each in (*full, *copied)]).tolist()
    joint, totals = known[: len(mine)], known[len(mine) :]
    pool.reserve(sum(totals))  # the only step that can fail
    for store, other, *pages in zip(mine, theirs, full, copied, joint, totals, strict=True):
        store._branch(sequence, other, *pages)


def clear_all(stores: Sequence[HeadPages], sequences: Int[Tensor, " n"]) -> None:
    """Release the pages of some sequences in all stores over one pool; these remain, empty.

    Lengths change in place. Synchronizes with the device once.

    Args:
        stores: the stores.
        sequences: which, each named once.
    """
    rows = [s.table_rows().view(s.length.shape)[:, sequences].flatten() for s in stores]
    held = [store.held_pages()[each] for store, each in zip(stores, rows, strict=True)]
    totals = torch.stack([each.sum() for each in held]).tolist()
    for store, mine, count, total in zip(stores, rows, held, totals, strict=True):
        row, column = spread(torch.zeros_like(count), count, total)
        store.pool.release(store.page_table.lookup(mine[row], column))
    for store in stores:
        store.length[:, sequences] = 0
        store._forget_bounds()
        store._note_change()


def expect_joined(mine: Sequence[HeadPages], theirs: Sequence[HeadPages]) -> None:
    """Raise if the sequences of some stores cannot be joined to others.

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
                "the pages are in two pools, and joining copies none; create both over one pool"
            )
        if type(store) is not type(other) or store.layout != other.layout:
            raise ValueError(
                f"pages of layout {other.layout} cannot join pages of layout {store.layout}; "
                "both sides need the same layout"
            )
        (layers, _, heads), (others, _, more) = store.length.shape, other.length.shape
        if (layers, heads) != (others, more):
            raise ValueError(
                f"{others} layers of {more} heads cannot join {layers} layers of {heads} heads; "
                "both sides need the same"
            )


def expect_some(stores: Sequence[HeadPages]) -> None:
    """Raise if there is no sequence.

    Raises:
        ValueError: all were released, or have joined others.
    """
    if not stores[0].length.shape[1]:
        raise ValueError(
            "no sequence is left here: all were released, or have joined others; use the tiers "
            "that have them, or let new sequences join"
        )


def release_all(stores: Sequence[HeadPages]) -> None:
    """Release all sequences of stores over one pool, with all their pages.

    Synchronizes with the device once.
    """
    held = [store.held_pages() for store in stores]
    for store, count, total in zip(
        stores, held, torch.stack([each.sum() for each in held]).tolist(), strict=True
    ):
        store.pool.release(store.page_table.within(count, total))
    for store in stores:
        store._empty()


def select_all(
    stores: Sequence[HeadPages], source: Int[Tensor, " B2"], shared: Sequence[HeadPages] = ()
) -> None:
    """Replace the sequences by source[0], source[1], ... in all stores over one pool, or in none.

    The stores have the same sequences, but may differ in layers and heads. The first occurrence of
    a sequence keeps its pages, further ones get copies of them, and sequences not named release
    theirs. In `shared` stores, further occurrences hold the same full pages and copy the last one
    only, which they append to. The number of sequences becomes B2.

    Raises:
        PoolExhausted: too few pages for the copies, including those released.
        ValueError: a sequence does not exist, or none is named.
    """
    pool, sequences = stores[0].pool, stores[0].length.shape[1]
    if source.numel() == 0:
        raise ValueError("no sequence is selected; name at least one, or release all of them")
    expect_some(stores)
    expect_within("sequence", source, sequences - 1)
    order = torch.arange(source.shape[0], device=source.device)
    again = (source[:, None] == source).int().argmax(1) < order
    left_out = torch.ones(sequences, dtype=torch.bool, device=source.device)
    left_out[source] = False
    held = [store.held_pages().view(store.length.shape) for store in stores]
    full = [
        store.length.long() // store.layout.tokens
        if any(store is each for each in shared)
        else torch.zeros_like(pages)
        for store, pages in zip(stores, held, strict=True)
    ]
    lost = [(each * left_out[:, None]).flatten() for each in held]
    kept = [(each[:, source] * again[:, None]).flatten() for each in full]
    every = [(each[:, source] * again[:, None]).flatten() for each in held]
    copied = [each - first for each, first in zip(every, kept, strict=True)]
    known = torch.stack([each.sum() for each in (*lost, *kept, *copied)]).tolist()
    back, joint, needed = (known[i * len(stores) :][: len(stores)] for i in range(3))
    gone = [
        store._table.within(count, total)
        for store, count, total in zip(stores, lost, back, strict=True)
    ]
    pool.reserve(sum(needed) - sum(map(pool.freed_by, gone)))  # the only step that can fail
    for pages in gone:
        pool.release(pages)
    for store in stores:
        rows = store.table_rows().view(store.length.shape)[:, source].flatten()
        store._reorder(rows, source)
    for store, first, more, count, total in zip(stores, kept, joint, copied, needed, strict=True):
        if more:
            pool.share(store._table.within(first, more))
        store._copy(first, count, total)


def move_together(pool: PagePool, stores: Sequence[HeadPages], free: int) -> None:
    """Shrink a pool whose pages these stores hold to `free` free pages, and update their tables.

    Raises:
        ValueError: the pool may not grow.
        RuntimeError: other stores hold pages of the pool; nothing has changed.
    """
    rename(stores, pool.shrink(torch.cat([store.pages() for store in stores]), free))


def rename(stores: Sequence[HeadPages], ids: Int[Tensor, " P1"]) -> None:
    """Replace page id i by ids[i] in the tables of stores."""
    for store in stores:
        if not store.page_table.reverse:  # the right side is renamed with the left
            store.page_table.rename(ids)
