"""The free list of a pool: a ring buffer of page ids, and the plan to shrink a pool."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kv_paging.checks import PoolExhausted


@dataclass(slots=True)
class FreeList:
    """Free page ids in a ring buffer: allocated at its start, released at its end.

    `ids` has an entry for each of P pages, and one more as a target for masked writes. All state is
    on the device, without synchronization, and changes in place: a captured step has its addresses.
    """

    ids: Int[Tensor, " P1"]
    start: Int[Tensor, ""]
    count: Int[Tensor, ""]  # pages that are free

    @classmethod
    def of(cls, first: Int[Tensor, " n"], pages: int, count: Int[Tensor, ""]) -> "FreeList":
        """Create a list of `pages` entries that starts with `first`, of which `count` are free."""
        ids = torch.zeros(pages + 1, dtype=torch.int32, device=first.device)
        ids[: len(first)] = first.to(ids.dtype)
        return cls(ids, torch.zeros_like(count), count)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        every = (self.ids, self.start, self.count)
        return sum(each.numel() * each.itemsize for each in every)

    def first(self, count: int) -> Int[Tensor, " count"]:
        """Return the ids of the first `count` free pages, in order."""
        return self.ids[self._places(self.start, count)].long()

    def skip(self, count: int | Int[Tensor, ""]) -> None:
        """Allocate the first `count` pages."""
        self.start.add_(count).remainder_(self._size)
        self.count.sub_(count)

    def add(self, pages: Int[Tensor, " n"]) -> None:
        """Release pages."""
        places = self._places(self.start + self.count, len(pages))
        self.ids[places] = pages.to(self.ids.dtype)
        self.count.add_(len(pages))

    def set(self, pages: Int[Tensor, " n"]) -> None:
        """Let these be the free pages, in order."""
        self.ids[: len(pages)] = pages.to(self.ids.dtype)
        self.start.zero_()
        self.count.fill_(len(pages))

    def take(self, wanted: Bool[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Allocate a page for each marked row; the others get the number of pages as their id."""
        rank = wanted.long().cumsum(0)
        pages = self.ids[(self.start + rank - 1) % self._size].long()
        self.skip(rank[-1])
        return pages.where(wanted, len(self.ids) - 1)

    def give(self, pages: Int[Tensor, " S"], back: Bool[Tensor, " S"]) -> None:
        """Release the page of each marked row."""
        rank = back.long().cumsum(0)
        place = (self.start + self.count + rank - 1) % self._size
        self.ids[place.where(back, len(self.ids) - 1)] = pages.to(self.ids.dtype)
        self.count.add_(rank[-1])

    @property
    def _size(self) -> int:
        return max(len(self.ids) - 1, 1)

    def _places(self, start: Tensor, count: int) -> Tensor:
        places = torch.arange(count, device=self.ids.device) + start
        return places.remainder_(self._size)


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves of pages, and the new id of every page."""

    source: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    ids: Int[Tensor, " P1"]  # new id of each page, and of the scratch page; 0 for removed pages
    free: Int[Tensor, " m"]  # free pages after the moves, in order


def together(held: Int[Tensor, " n"], pages: int, fewer: int) -> Moves:
    """Plan the move of held pages into the first `fewer` of `pages` pages.

    Only pages beyond these move. At most `fewer` are held, each named once. Synchronizes.
    """
    ids = torch.arange(pages + 1, device=held.device)
    taken = torch.zeros(pages, dtype=torch.bool, device=held.device)
    taken[held] = True
    source = taken[fewer:].nonzero()[:, 0] + fewer
    gaps = (~taken[:fewer]).nonzero()[:, 0]
    # There are as many held pages beyond as gaps before, minus the gaps that stay free.
    target, free = gaps[: len(source)], gaps[len(source) :]
    ids[fewer:] = 0
    ids[source], ids[pages] = target, fewer
    return Moves(source, target, ids, free)


def moved_out(free: Int[Tensor, " f"], pages: Int[Tensor, " n"], every: int) -> Moves:
    """Plan to move what `pages` hold to free pages outside of them.

    Args:
        free: the free pages, in order.
        pages: free or held pages, each named once.
        every: number of pages.

    Raises:
        PoolExhausted: too few others are free.
    """
    ids = torch.arange(every + 1, device=free.device)
    leaving = torch.zeros(every, dtype=torch.bool, device=free.device)
    leaving[pages] = True
    gone = leaving[free]
    vacant, others = free[gone], free[~gone]
    leaving[vacant] = False
    source = leaving.nonzero()[:, 0]
    if len(source) > len(others):
        raise PoolExhausted(len(source), len(others))
    target = others[: len(source)]
    ids[source] = target
    return Moves(source, target, ids, others[len(target) :])
