"""Operations on whole sequences of tiers: select, join and release."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging.head_pages import (
    HeadPages,
    branch_all,
    clear_all,
    move_together,
    release_all,
    rename,
    select_all,
)
from kv_paging.page_reservation import PageReservation
from kv_paging.pool import PagePool
from kv_paging.store import TokenStore
from kv_paging.work import NewTokens, Placement
from kv_policy import DROP, NOBODY


class Sequences(ABC):
    """The sequences of tiers over one pool, in all stores at once.

    Other stores of the same sequences over the pool are passed as `also`.
    """

    pool: PagePool
    _room: PageReservation

    @property
    @abstractmethod
    def tiers(self) -> int:
        """K."""

    @property
    @abstractmethod
    def parts(self) -> tuple[TokenStore, ...]:
        """The stores of all kinds, each with vectors of one rank."""

    @property
    @abstractmethod
    def settled(self) -> tuple[TokenStore, ...]:
        """The stores whose full pages do not change when tokens are appended."""

    def pages(self) -> Int[Tensor, " n"]:
        """Return the ids of all pages held by the tiers; for `PagePool.check`."""
        return torch.cat([store.pages() for store in self.parts])

    def check(self) -> None:
        """Check that every page is free or held once, if nothing else uses the pool.

        Raises:
            RuntimeError: a page is missing or occurs twice.
        """
        self.pool.check(self.pages())

    def select(
        self, source: Int[Tensor, " B2"], also: Sequence[HeadPages] = (), *, share: bool = False
    ) -> None:
        """Replace the sequences by source[0], source[1], ... in all stores, or in none.

        With `share`, a sequence named again holds the same full pages of the tiers, which are
        copied when tokens in them change: when one is evicted, moved or scored. Tokens can be
        appended meanwhile, with `append` or `grow`. Without, and in `also`, its pages are copied.

        Raises:
            PoolExhausted: too few pages for the copies, including those released.
            ValueError: a sequence does not exist, or none is named.
        """
        select_all((*self.parts, *also), source, self.parts if share else ())

    def branch(
        self,
        sequence: int,
        other: "Sequences",
        also: Sequence[tuple[HeadPages, HeadPages]] = (),
        *,
        share: bool = False,
        whole: bool = False,
    ) -> None:
        """Give the only sequence of empty tiers over the pool the tokens of one of these.

        Args:
            sequence: its number.
            other: the empty tiers.
            also: further stores of both, over the same pool.
            share: whether both hold the same full pages, as for `select`; residuals of blocks and
                pages of `also` are copied.
            whole: whether no page is copied; then one of the two must be released before either
                changes.

        Raises:
            PoolExhausted: too few pages for the copies; nothing has changed.
            ValueError: as `join`, or the sequence does not exist; nothing has changed.
        """
        self._expect_type(other)
        mine = (*self.parts, *(each for each, _ in also))
        theirs = (*other.parts, *(each for _, each in also))
        branch_all(sequence, mine, theirs, self.settled if share else (), whole=whole)

    def shared_pages(self) -> Int[Tensor, " B"]:
        """Count each sequence's pages that others hold, too; without synchronizing if none are."""
        each = [store.shared_pages() for store in self.parts]
        return torch.stack(each).sum(0)

    def own(self) -> None:
        """Copy the pages that several sequences hold; see `HeadPages.own`.

        Raises:
            PoolExhausted: too few pages for the copies.
        """
        for store in self.parts:
            store.own()

    def step(
        self,
        candidate: UInt8[Tensor, " S"],
        victim: UInt8[Tensor, " S"],
        target: UInt8[Tensor, " S"],
        place: Int[Tensor, "K S"],
        key: Float[Tensor, "S D"],
        value: Float[Tensor, "S Dv"],
        score: Float[Tensor, " S"] | None = None,
        position: Int[Tensor, " S"] | None = None,
    ) -> None:
        """Insert one token into each table row, and evict or move one to a later tier.

        A victim that moves is decoded from its tier and encoded again. A candidate of the victim's
        tier takes its slot; otherwise the tier's last token does, and an emptied page is released
        before any is allocated. Each tier allocates at most a page per row, or two if a page holds
        one token.

        Args:
            candidate: tier of the new token, or DROP.
            victim: tier whose weakest token moves, or NOBODY; nothing moves if `place` is -1.
            target: a later tier than the victim's, or DROP.
            place: the places returned by `weakest`.
            key: of the new token.
            value: of the new token.
            score: of the new token, if pages store scores.
            position: of the new token, if pages store positions.

        Raises:
            PoolExhausted: the pool is fixed and has too few pages; nothing has changed.
            ValueError: shapes do not match, or scores or positions are missing or not stored here.
        """
        self.own()
        for store in self.parts:
            if store.bounds is not None:
                store.bounds.forget(store.table_rows())
        choice = Placement(candidate, victim, target)
        self._step(choice, place, NewTokens(key, value, score, position))

    def grow(
        self,
        some: Bool[Tensor, " S"],
        key: Float[Tensor, "S D"],
        value: Float[Tensor, "S Dv"],
        score: Float[Tensor, " S"] | None = None,
        position: Int[Tensor, " S"] | None = None,
    ) -> None:
        """Append one token to the first tier of each marked table row, and evict none, as `step`.

        Pages that several sequences hold remain theirs.

        Raises:
            PoolExhausted: the pool is fixed and has too few pages; nothing has changed.
            ValueError: shapes do not match, or scores or positions are missing or not stored here.
        """
        first = torch.zeros_like(some, dtype=torch.uint8)
        nowhere = some.new_full((self.tiers, len(some)), -1, dtype=torch.long)
        choice = Placement(first.masked_fill(~some, DROP), first + NOBODY, first + DROP)
        self._step(choice, nowhere, NewTokens(key, value, score, position))

    @abstractmethod
    def _step(self, choice: Placement, place: Int[Tensor, "K S"], token: NewTokens) -> None:
        """Apply a step; no row that loses a token holds a page of others."""

    def join(self, other: "Sequences") -> None:
        """Append the sequences of other tiers over the pool, in every layer.

        Pages only change their owner: no bytes are copied, without synchronizing with the device.
        The other tiers have no sequences afterwards, as after `release`.

        Raises:
            ValueError: another pool, other layouts, or other layers or heads; nothing has changed.
        """
        self._expect_type(other)
        self._room.join(other._room)

    def _expect_type(self, other: "Sequences") -> None:
        if type(self) is not type(other):
            raise ValueError(
                f"{type(other).__name__} cannot join {type(self).__name__}; both need one type"
            )

    def fix(self, tokens: int) -> None:
        """Let tables and lengths stay where they are, for table rows of up to `tokens` tokens.

        Sequences then begin and end by `adopt` and `clear_in_place`, and `prepare` is called before
        each step. A step changes nothing but numbers in place, so it can be captured.
        """
        self._room.fix(tokens)

    def prepare(self, grows: Callable[[], Bool[Tensor, " B"]], sequences: int) -> None:
        """Reserve the pages of the next step; reads from the device as `Tiers.step` does.

        Args:
            grows: returns which sequences get a token; called only if pages may be short.
            sequences: at least as many as there are.

        Raises:
            PoolExhausted: a fixed pool may have too few pages; nothing has changed.
            ValueError: the tables are too narrow for the tokens of a row.
        """
        self._room.before_step(grows, sequences)

    def adopt(self, sequence: int, other: "Sequences") -> None:
        """Let an empty sequence have the pages of the only one of other tiers over the pool.

        All changes are in place. The other tiers have no sequence afterwards.

        Raises:
            ValueError: as `join`; nothing has changed.
        """
        self._expect_type(other)
        self._room.adopt(sequence, other._room)

    def clear_in_place(self, sequences: Int[Tensor, " n"], also: Sequence[HeadPages] = ()) -> None:
        """Release the pages of sequences, which remain, empty; synchronizes once."""
        clear_all((*self.parts, *also), sequences)

    def release(self) -> None:
        """Release all sequences with all their pages; synchronizes once.

        Without sequences, tokens and steps are rejected until others join.
        """
        release_all(self.parts)

    def trim(self, also: Sequence[HeadPages] = ()) -> None:
        """Shrink a growing pool: free the memory that the next steps do not need.

        As many pages stay free as a step may allocate: one per row and store, or two if a page
        holds a single token. Held pages move unchanged, and views become invalid. During the copy,
        the old and the new memory both exist. Synchronizes with the device.

        Raises:
            ValueError: the pool may not grow.
            RuntimeError: other stores hold pages of the pool; nothing has changed.
        """
        move_together(self.pool, (*self.parts, *also), self._room.spare)

    def rename(self, ids: Int[Tensor, " P1"], also: Sequence[HeadPages] = ()) -> None:
        """Replace page id i by ids[i] in all tables, after `PagePool.withdraw` moved pages."""
        rename((*self.parts, *also), ids)
