"""The free list of a pool: a ring buffer of page ids, and the plan by which a pool shrinks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(slots=True)
class FreeList:
    """Page ids in a contiguous, wrapping run: taken at its start, given back at its end.

    `ids` has a place for each of P pages, and one more for what a mask rules out. Everything is on
    the device, and nothing here waits for it. What changes these tensors in place, as a native step
    does, takes and gives back pages.
    """

    ids: Int[Tensor, " P1"]
    start: Int[Tensor, ""]
    count: Int[Tensor, ""]  # pages that are free

    @classmethod
    def of(cls, first: Int[Tensor, " n"], pages: int, count: Int[Tensor, ""]) -> "FreeList":
        """Let the first of so many pages' places hold these, of which `count` are free."""
        ids = torch.zeros(pages + 1, dtype=torch.int32, device=first.device)
        ids[: len(first)] = first.to(ids.dtype)
        return cls(ids, torch.zeros_like(count), count)

    @property
    def nbytes(self) -> int:
        """Memory."""
        every = (self.ids, self.start, self.count)
        return sum(each.numel() * each.itemsize for each in every)

    def first(self, count: int) -> Int[Tensor, " count"]:
        """Give the ids of the first `count` free pages, in order."""
        return self.ids[self._places(self.start, count)].long()

    def skip(self, count: int | Int[Tensor, ""]) -> None:
        """Take the first `count` pages."""
        self.start = (self.start + count) % self._size
        self.count = self.count - count

    def add(self, pages: Int[Tensor, " n"]) -> None:
        """Give pages back."""
        places = self._places(self.start + self.count, len(pages))
        self.ids[places] = pages.to(self.ids.dtype)
        self.count = self.count + len(pages)

    def take(self, wanted: Bool[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Take a page for each marked row; the others get the number of pages."""
        rank = wanted.long().cumsum(0)
        pages = self.ids[(self.start + rank - 1) % self._size].long()
        self.skip(rank[-1])
        return pages.where(wanted, len(self.ids) - 1)

    def give(self, pages: Int[Tensor, " S"], back: Bool[Tensor, " S"]) -> None:
        """Give back the page of each marked row."""
        rank = back.long().cumsum(0)
        place = (self.start + self.count + rank - 1) % self._size
        self.ids[place.where(back, len(self.ids) - 1)] = pages.to(self.ids.dtype)
        self.count = self.count + rank[-1]

    @property
    def _size(self) -> int:
        return max(len(self.ids) - 1, 1)

    def _places(self, start: Tensor, count: int) -> Tensor:
        places = torch.arange(count, device=self.ids.device) + start
        return places.remainder_(self._size)


@dataclass(frozen=True, slots=True)
class Together:
    """Which pages move where, and what all pages are called after that."""

    source: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    ids: Int[Tensor, " P1"]  # new id of each page, and of the scratch page; 0 for what is gone
    free: Int[Tensor, " m"]  # pages free after that, in order


def together(held: Int[Tensor, " n"], pages: int, fewer: int) -> Together:
    """Say how held pages fit into the first `fewer` of `pages` pages: only those beyond move.

    There are at most `fewer` of them, each named once. The host waits for the device.
    """
    ids = torch.arange(pages + 1, device=held.device)
    taken = torch.zeros(pages, dtype=torch.bool, device=held.device)
    taken[held] = True
    source = taken[fewer:].nonzero()[:, 0] + fewer
    gaps = (~taken[:fewer]).nonzero()[:, 0]
    # Held pages beyond are as many as gaps before, less those that stay free.
    target, free = gaps[: len(source)], gaps[len(source) :]
    ids[fewer:] = 0
    ids[source], ids[pages] = target, fewer
    return Together(source, target, ids, free)
