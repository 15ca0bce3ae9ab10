"""What the host knows of tiers without asking the device: how long streams can be, pages promised.

Each store bounds its own longest stream. Here it is bounded how many tokens two stores that share a
page table can have in one stream together, so that the table never overflows, and for how many
steps a promise of pages lasts.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging.store import TokenStore
from kv_paging.table import columns_for, pages_for

_PATIENCE: Final = 64  # steps after which lengths are read, if nothing else made the host wait


class Room:
    """Room for the steps to come, in the pool and in page tables."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        """Know that the streams of the stores, one per tier, are empty."""
        self._stores = tuple(stores)
        self._pool = stores[0].pool
        # A step brings a stream of the first tier its candidate, and of a later one a victim too.
        self._grown = tuple(min(i + 1, 2) for i in range(len(stores)))
        shortest = min(store.layout.tokens for store in stores)
        self._steps = max(1, shortest // self._grown[-1])  # with no second new page in a stream
        self._pages = -(-self._steps * self._grown[-1] // shortest)
        self._steps_left = 0
        self._patience = _PATIENCE
        self._promise = -1
        self._changes = -1
        self._totals = [0] * len(stores[::2])  # of stores 0 and 1, of 2 and 3, and so on

    @property
    def spare(self) -> int:
        """Pages that the pool promises at a time: with so many free, a step need not wait."""
        return self._stores[0].length.numel() * len(self._stores) * self._pages

    def for_step(self, need: Callable[[], Int[Tensor, ""]]) -> tuple[int, ...]:
        """Make room for a step, and give bounds of the lengths after it.

        The pool promises a page per stream and tier, which lasts for as many steps as fill a page.

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
        return self._widen()

    def _note_changes(self) -> None:
        """Bound the totals anew where stores have changed otherwise than by steps."""
        changes = sum(store.changes for store in self._stores)
        if changes != self._changes:
            self._changes = changes
            longest = [store.longest for store in self._stores]
            self._totals = [sum(longest[i : i + 2]) for i in range(0, len(longest), 2)]

    def _read(self) -> None:
        """Ask the device how long streams are: here the host waits for it."""
        length = torch.stack([store.length.flatten().long() for store in self._stores])
        pairs = torch.stack([length[i : i + 2].sum(0) for i in range(0, len(length), 2)])
        known = torch.cat((length, pairs)).amax(1).tolist()
        for store, longest in zip(self._stores, known, strict=False):
            store.set_longest(longest)
        self._totals = known[len(length) :]
        self._patience = _PATIENCE

    def _widen(self) -> tuple[int, ...]:
        """Make room in the tables for what a step can bring, and give bounds of the lengths."""
        bounds: list[int] = []
        for i, total in enumerate(self._totals):
            pair = self._stores[2 * i : 2 * i + 2]
            self._totals[i] = total = total + self._grown[2 * i]
            bounds += [
                min(store.longest + grown, total)
                for store, grown in zip(pair, self._grown[2 * i :], strict=False)
            ]
            tokens = [store.layout.tokens for store in pair]
            apart = sum(map(pages_for, bounds[2 * i :], tokens))
            pair[0].widen(min(apart, columns_for(total, min(tokens))))
        return tuple(bounds)
