"""Host-side bounds for steps without synchronization: lengths of rows, and reserved pages.

Each store bounds its longest row. This module bounds the tokens of two stores that share a page
table per table row, so that the table never overflows, and the number of steps that a reservation
of pages covers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kv_paging.head_pages import adopt_all, join_all
from kv_paging.store import TokenStore
from kv_paging.table import columns_for, pages_for

_PATIENCE: Final = 64  # steps after which lengths are read, unless the host synchronized before


class PageReservation:
    """Reserves pages of the pool and columns of page tables for upcoming steps.

    Stores are grouped, one group per kind of table rows, with a store per tier. In a group,
    consecutive stores share a page table in pairs.
    """

    def __init__(self, groups: Sequence[Sequence[TokenStore]]) -> None:
        """Start with stores whose table rows are empty."""
        self._groups = tuple(map(tuple, groups))
        self._stores = [store for group in self._groups for store in group]
        self._pool = self._stores[0].pool
        # A step adds the candidate to a row of the first tier, and also a victim to one of a later
        # tier.
        self._grown = tuple(min(i + 1, 2) for i in range(len(self._groups[0])))
        shortest = min(store.layout.tokens for store in self._stores)
        self._steps = max(1, shortest // self._grown[-1])  # with at most one new page per table row
        self._pages = -(-self._steps * self._grown[-1] // shortest)
        self._steps_left = 0
        self._patience = _PATIENCE
        self._promise = -1
        self._changes = -1
        self._totals: list[int] = []  # per pair that shares a table
        self._fixed = False  # whether `before_step` reserves, and tables keep their width

    @property
    def spare(self) -> int:
        """Pages reserved at a time: with this many free, a step does not synchronize."""
        return self._spare(self._stores[0].length.shape[1])

    def _spare(self, sequences: int) -> int:
        rows = sum(store.length.shape[0] * store.length.shape[2] for store in self._stores)
        return rows * sequences * self._pages

    def for_step(self, need: Callable[[], Int[Tensor, ""]]) -> None:
        """Reserve pages for a step, and update the stores' bounds of lengths.

        The pool reserves a page per row and tier, which covers as many steps as fill a page.

        Raises:
            PoolExhausted: the pool is fixed, and has fewer pages than `need` returns; nothing has
                changed.
        """
        if not self._fixed:
            self._reserve(self.spare, need)
            self._widen()

    def fix(self, tokens: int) -> None:
        """Widen the tables for rows of up to `tokens` tokens; from now on they keep their width."""
        for pair in self._pairs:
            pair[0].widen(columns_for(tokens, min(store.layout.tokens for store in pair)))
        self._fixed = True

    def before_step(self, grows: Callable[[], Bool[Tensor, " B"]], sequences: int) -> None:
        """Do what `for_step` does, before what the step will move is known.

        A token of the first tier, and two of each later one, may be added to each row.

        Args:
            grows: returns which sequences get a token; called only if pages may be short.
            sequences: at least as many as there are.

        Raises:
            PoolExhausted: the pool is fixed, and may have too few pages; nothing has changed.
            ValueError: the tables are too narrow for the tokens of a row.
        """

        def need() -> Int[Tensor, ""]:
            new, some = [], grows()[:, None]
            for group in self._groups:
                for store, more in zip(group, self._grown, strict=True):
                    length = store.length.long()
                    opened = pages_for(length + more, store.layout.tokens)
                    opened = opened - pages_for(length, store.layout.tokens)
                    new.append((opened * some).sum())
            return torch.stack(new).sum()

        self._reserve(self._spare(sequences), need)
        if not self._fits():
            self._read()  # bounds may be too high
        if not self._fits():
            raise ValueError(
                f"a table row has {max(self._totals)} tokens, for which the fixed tables are too "
                "narrow; fix them for the longest sequence"
            )
        self._widen()

    def _fits(self) -> bool:
        return all(pair[0].page_table.width >= columns for pair, _, columns in self._after_a_step())

    def _reserve(self, most: int, need: Callable[[], Int[Tensor, ""]]) -> None:
        self._note_changes()
        self._patience -= 1
        waits = self._patience <= 0
        if self._steps_left == 0 or self._promise != self._pool.promises:
            waits = waits or self._pool.least_free < most
            promised = self._pool.ensure(most, need)
            self._steps_left = self._steps if promised else 1
            self._promise = self._pool.promises
        self._steps_left -= 1
        if waits:
            self._read()

    def adopt(self, sequence: int, other: "PageReservation") -> None:
        """Let the stores of the other have an empty sequence of these, as `join`.

        Raises:
            ValueError: the stores cannot be joined; nothing has changed.
        """
        self._join(other, lambda: adopt_all(sequence, self._stores, other._stores))

    def join(self, other: "PageReservation") -> None:
        """Join the stores of the other to these, with bounds that hold for all table rows.

        The reservation covers only the former table rows, so the next step reserves again.

        Raises:
            ValueError: the stores cannot be joined; nothing has changed.
        """
        self._join(other, lambda: join_all(self._stores, other._stores))

    def _join(self, other: "PageReservation", join: Callable[[], None]) -> None:
        self._note_changes()
        other._note_changes()
        totals = [max(pair) for pair in zip(self._totals, other._totals, strict=False)]
        join()
        self._totals, self._changes = totals, self._changes_of_stores()
        self._patience = min(self._patience, other._patience)
        self._steps_left = other._steps_left = 0

    @property
    def _pairs(self) -> list[tuple[TokenStore, ...]]:
        return [group[i : i + 2] for group in self._groups for i in range(0, len(group), 2)]

    def _note_changes(self) -> None:
        """Update the bounds if stores have changed other than by steps."""
        changes = self._changes_of_stores()
        if changes != self._changes:
            self._changes = changes
            self._totals = [sum(store.longest for store in pair) for pair in self._pairs]

    def _changes_of_stores(self) -> int:
        return sum(store.changes for store in self._stores)

    def _read(self) -> None:
        """Read the lengths of table rows; this synchronizes with the device."""
        length = [store.length.flatten().long() for store in self._stores]
        each = iter(length)
        pairs = [torch.stack([next(each) for _ in pair]).sum(0) for pair in self._pairs]
        known = torch.stack([x.amax() for x in (*length, *pairs)]).tolist()
        for store, longest in zip(self._stores, known, strict=False):
            store.set_longest(longest)
        self._totals = known[len(length) :]
        self._patience = _PATIENCE

    def _after_a_step(self) -> Iterator[tuple[tuple[TokenStore, ...], list[int], int]]:
        """Yield each pair with the bounds of its lengths after a step, and of its columns."""
        grown = [self._grown[i : i + 2] for i in range(0, len(self._grown), 2)] * len(self._groups)
        for total, pair, more in zip(self._totals, self._pairs, grown, strict=True):
            after = total + more[0]
            bounds = [min(store.longest + n, after) for store, n in zip(pair, more, strict=True)]
            tokens = [store.layout.tokens for store in pair]
            apart = sum(map(pages_for, bounds, tokens))
            yield pair, [after, *bounds], min(apart, columns_for(after, min(tokens)))

    def _widen(self) -> None:
        """Widen the tables for the tokens of a step, and update the bounds of lengths."""
        every = list(self._after_a_step())
        self._totals = [total for _, (total, *_), _ in every]
        for pair, (_, *bounds), columns in every:
            pair[0].widen(columns)
            for store, longest in zip(pair, bounds, strict=True):
                store.set_longest(longest)
