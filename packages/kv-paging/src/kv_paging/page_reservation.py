"""What the host knows of tiers without asking the device: how long rows can be, pages promised.

Each store bounds its own longest row. Here it is bounded how many tokens two stores that share a
page table can have in one table row together, so that the table never overflows, and for how many
steps a promise of pages lasts.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging.head_pages import join_all
from kv_paging.store import TokenStore
from kv_paging.table import columns_for, pages_for

_PATIENCE: Final = 64  # steps after which lengths are read, if nothing else made the host wait


class PageReservation:
    """Room for the steps to come, in the pool and in page tables.

    Stores come in groups, one for each kind of table rows, with a store per tier. Of a group, two
    stores after one another share a page table.
    """

    def __init__(self, groups: Sequence[Sequence[TokenStore]]) -> None:
        """Know that the table rows of the stores are empty."""
        self._groups = tuple(map(tuple, groups))
        self._stores = [store for group in self._groups for store in group]
        self._pool = self._stores[0].pool
        # A step brings a row of the first tier its candidate, and of a later one a victim too.
        self._grown = tuple(min(i + 1, 2) for i in range(len(self._groups[0])))
        shortest = min(store.layout.tokens for store in self._stores)
        self._steps = max(1, shortest // self._grown[-1])  # with no second new page in a table row
        self._pages = -(-self._steps * self._grown[-1] // shortest)
        self._steps_left = 0
        self._patience = _PATIENCE
        self._promise = -1
        self._changes = -1
        self._totals: list[int] = []  # of each pair that shares a table

    @property
    def spare(self) -> int:
        """Pages that the pool promises at a time: with so many free, a step need not wait."""
        return sum(store.length.numel() for store in self._stores) * self._pages

    def for_step(self, need: Callable[[], Int[Tensor, ""]]) -> None:
        """Make room for a step, and let the stores know bounds of the lengths after it.

        The pool promises a page per row and tier, which lasts for as many steps as fill a page.

        Raises:
            PoolExhausted: the pool is fixed, and has not even what `need` says; nothing has
                changed.
        """
        self._note_changes()
        self._patience -= 1
        waits = self._patience <= 0
        if self._steps_left == 0 or self._promise != self._pool.promises:
            most = self.spare
            waits = waits or self._pool.least_free < most
            promised = self._pool.ensure(most, need)
            self._steps_left = self._steps if promised else 1
            self._promise = self._pool.promises
        self._steps_left -= 1
        if waits:
            self._read()
        self._widen()

    def join(self, other: "PageReservation") -> None:
        """Join the stores of the other to these, and know bounds that hold for all table rows.

        What is promised is for the table rows there were, so the next step asks the pool anew.

        Raises:
            ValueError: the stores cannot be joined; nothing has changed.
        """
        self._note_changes()
        other._note_changes()
        totals = [max(pair) for pair in zip(self._totals, other._totals, strict=False)]
        join_all(self._stores, other._stores)
        self._totals, self._changes = totals, self._changes_of_stores()
        self._patience = min(self._patience, other._patience)
        self._steps_left = other._steps_left = 0

    @property
    def _pairs(self) -> list[tuple[TokenStore, ...]]:
        return [group[i : i + 2] for group in self._groups for i in range(0, len(group), 2)]

    def _note_changes(self) -> None:
        """Bound the totals anew where stores have changed otherwise than by steps."""
        changes = self._changes_of_stores()
        if changes != self._changes:
            self._changes = changes
            self._totals = [sum(store.longest for store in pair) for pair in self._pairs]

    def _changes_of_stores(self) -> int:
        return sum(store.changes for store in self._stores)

    def _read(self) -> None:
        """Ask the device how long table rows are: here the host waits for it."""
        length = [store.length.flatten().long() for store in self._stores]
        each = iter(length)
        pairs = [torch.stack([next(each) for _ in pair]).sum(0) for pair in self._pairs]
        known = torch.stack([x.amax() for x in (*length, *pairs)]).tolist()
        for store, longest in zip(self._stores, known, strict=False):
            store.set_longest(longest)
        self._totals = known[len(length) :]
        self._patience = _PATIENCE

    def _widen(self) -> None:
        """Make room in the tables for what a step can bring, and note how long rows may be."""
        grown = [self._grown[i : i + 2] for i in range(0, len(self._grown), 2)] * len(self._groups)
        for i, (pair, more) in enumerate(zip(self._pairs, grown, strict=True)):
            self._totals[i] = total = self._totals[i] + more[0]
            bounds = [min(store.longest + n, total) for store, n in zip(pair, more, strict=True)]
            tokens = [store.layout.tokens for store in pair]
            apart = sum(map(pages_for, bounds, tokens))
            pair[0].widen(min(apart, columns_for(total, min(tokens))))
            for store, longest in zip(pair, bounds, strict=True):
                store.set_longest(longest)
