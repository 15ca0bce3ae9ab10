"""What happens to whole sequences of tiers: they change places, join others, come and go."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging.head_pages import HeadPages, move_together, release_all, select_all
from kv_paging.page_reservation import PageReservation
from kv_paging.pool import PagePool
from kv_paging.store import TokenStore


class Sequences(ABC):
    """The sequences of tiers over one pool, in all stores at once.

    Where other stores over the pool belong to the same sequences, they go along as `also`.
    """

    pool: PagePool
    _room: PageReservation

    @property
    @abstractmethod
    def parts(self) -> tuple[TokenStore, ...]:
        """The stores of all kinds, each of table rows with vectors of one length."""

    def pages(self) -> Int[Tensor, " n"]:
        """Give the ids of all pages the tiers hold; for `PagePool.check`."""
        return torch.cat([store.pages() for store in self.parts])

    def check(self) -> None:
        """Check that every page is either free or in one place, where nobody else uses the pool.

        Raises:
            RuntimeError: a page is missing, or is in two places.
        """
        self.pool.check(self.pages())

    def select(self, source: Int[Tensor, " B2"], also: Sequence[HeadPages] = ()) -> None:
        """Let the sequences become source[0], source[1], ... in all stores, or in none.

        Raises:
            PoolExhausted: too few pages for the copies, those given back counted in.
            ValueError: a sequence that does not exist, or none.
        """
        select_all((*self.parts, *also), source)

    def join(self, other: "Sequences") -> None:
        """Let the sequences of other tiers over the pool come after these, in every layer.

        Pages change their owner: no byte of one moves, and nothing waits for the device. The other
        tiers are left without a sequence, as after `release`.

        Raises:
            ValueError: another pool, other layouts, or other layers or heads; nothing has changed.
        """
        if type(self) is not type(other):
            raise ValueError(
                f"{type(other).__name__} cannot join {type(self).__name__}; both must be alike"
            )
        self._room.join(other._room)

    def release(self) -> None:
        """Let all sequences go, with all pages, in one wait for the device.

        There is no sequence then, and tokens and steps are refused, until others join.
        """
        release_all(self.parts)

    def trim(self, also: Sequence[HeadPages] = ()) -> None:
        """Give back the memory of a growing pool that nobody holds and the next steps do not need.

        Free stay as many pages as a step may take: one per row and store, two where a page holds
        a single token. Held pages move, bytes as they are, and views are made anew. While they are
        copied, the old memory and the new one both exist. The host waits for the device.

        Raises:
            ValueError: the pool may not grow.
            RuntimeError: somebody else holds pages of the pool; nothing has changed.
        """
        move_together(self.pool, (*self.parts, *also), self._room.spare)
