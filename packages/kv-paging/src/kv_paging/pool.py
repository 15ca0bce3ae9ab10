"""A pool of equal byte pages with a circular list of the free ones."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from kv_paging.checks import PoolExhausted, expect_each_once, expect_memory, expect_sizes
from kv_paging.free_list import FreeList, together
from kv_paging.moves import copy_pages

_POISON = 0xFF  # as float16, bfloat16 or float32 these bytes are NaN


class PagePool:
    """Equal byte pages for everybody; it knows which are free, and not what the others hold.

    The ids of the free pages are one contiguous, wrapping run of a ring: taking advances its start,
    giving back appends at its end, so any number of pages is taken or given back at once, and a
    prefix sum over the takers' needs tells each which of them are its own (LeanKV section 5.2).

    The ring, its start and the number of free pages are on the device. The host knows a lower bound
    of that number. `take` and `give` let the device decide how many pages go, and never wait for
    it; `allocate` and `release` are for a number that the host knows. The host reads the true
    number, and waits for it, in `free`, `used` and `check`, and in `allocate`, `reserve` and
    `ensure` if the lower bound is below what is asked.
    """

    def __init__(
        self,
        page_bytes: int,
        pages: int = 0,
        *,
        grows: bool = True,
        device: torch.device | str = "cpu",
        poison: bool = False,
        kernels: str | None = None,
    ) -> None:
        """Hold `pages` free pages of `page_bytes` bytes.

        Args:
            page_bytes: bytes of one page.
            pages: pages to begin with.
            grows: take more memory when no page is free; otherwise that is PoolExhausted.
            device: where the pages and the list of free ones live.
            poison: fill free pages with NaN bytes, so that a test sees when one is read.
            kernels: name of the code that writes and reads the pages, see `kernels.chosen`; None:
                native code on a CPU, or Triton on a GPU, where it is installed and can, else torch.

        Raises:
            ValueError: a page of no bytes, fewer than no pages, or none in a pool that cannot grow.
        """
        expect_sizes(page_bytes, pages, grows)
        self.page_bytes = page_bytes
        self.grows = grows
        self.kernels = kernels
        self.poison = poison
        self._data = torch.zeros(1, page_bytes, dtype=torch.uint8, device=device)
        none = torch.zeros((), dtype=torch.long, device=device)
        self.ring = FreeList.of(none[None], 0, none)
        self._least = 0
        self._promises = 0
        self._grow(pages, 0)

    @classmethod
    def over(
        cls, data: UInt8[Tensor, "P1 N"], *, poison: bool = False, kernels: str | None = None
    ) -> "PagePool":
        """Use memory that somebody else owns: each row is a page, and the last the scratch page.

        All pages are free to begin with, and none is cleared or copied. The pool never grows.

        Args:
            data: the memory; rows may stand apart, each is a run of bytes.
            poison: as in the constructor; free pages are all of `data`.
            kernels: as in the constructor.

        Raises:
            ValueError: fewer than two rows, rows that overlap or are not runs, or no bytes.
        """
        expect_memory(data)
        pool = cls(data.shape[1], device=data.device, poison=poison, kernels=kernels)
        pool._data, pool.grows, pool._least = data, False, len(data) - 1
        free = torch.arange(pool._least, device=data.device)
        pool.ring = FreeList.of(free, len(free), pool.ring.count + len(free))
        if poison:
            data.fill_(_POISON)
        return pool

    @property
    def data(self) -> UInt8[Tensor, "P page_bytes"]:
        """The bytes of all pages; growth replaces this tensor, so ask for it again each time."""
        return self._data[:-1]

    @property
    def padded(self) -> UInt8[Tensor, "P1 page_bytes"]:
        """All pages, and after them a scratch page for writes that are to have no effect."""
        return self._data

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._data.device

    @property
    def capacity(self) -> int:
        """Pages there are; as a page id, the scratch page of `padded`."""
        return self._data.shape[0] - 1

    @property
    def free(self) -> int:
        """Pages nobody holds; the host waits for the device."""
        return int(self.ring.count)

    @property
    def used(self) -> int:
        """Pages somebody holds; the host waits for the device."""
        return self.capacity - self.free

    @property
    def least_free(self) -> int:
        """A lower bound of the free pages that are promised to nobody, known without waiting."""
        return self._least

    @property
    def promises(self) -> int:
        """A number that changes when what `ensure` promised before no longer holds."""
        return self._promises

    @property
    def held_bytes(self) -> int:
        """Memory of all pages, free ones included, whoever owns it."""
        return self.capacity * self.page_bytes

    @property
    def table_bytes(self) -> int:
        """Memory beside the pages: list of the free ones with its ends, and the scratch page."""
        return self.page_bytes + self.ring.nbytes

    def allocate(self, count: int) -> Int[Tensor, " count"]:
        """Take `count` pages and give their ids, in the order in which they became free.

        A pool that grows and has too few takes what is missing, a sixteenth of what it has at
        least, so that pages are copied rarely; while it grows, old and new pages both exist.

        Raises:
            PoolExhausted: too few are free and the pool may not grow.
            ValueError: a negative count.
        """
        if count < 0:
            raise ValueError(f"{count} pages cannot be taken; ask for 0 or more")
        self._promises += 1
        if count > self._least and self._look() < count:
            self._grow_for(count, self.capacity // 16)
        pages = self.ring.first(count)
        self.ring.skip(count)
        self._least -= count
        return pages

    def release(self, pages: Int[Tensor, " n"]) -> None:
        """Give pages back; each must be held, and be named once. `check` finds who breaks this.

        Raises:
            ValueError: more pages than can be held.
        """
        count, most = pages.shape[0], self.capacity - self._least
        if count > most:
            raise ValueError(f"{count} pages are given back and only {most} are held")
        if count == 0:
            return
        self._promises += 1
        self.ring.add(pages)
        self._least += count
        if self.poison:
            self._data[pages] = _POISON

    def take(self, wanted: Bool[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Take a page for each marked row, without waiting; `ensure` that there are enough.

        Rows that are not marked get the scratch page of `padded`.
        """
        return self.ring.take(wanted) if len(wanted) else wanted.long()

    def give(self, pages: Int[Tensor, " S"], back: Bool[Tensor, " S"]) -> None:
        """Give back the page of each marked row, which must be held, without waiting."""
        if len(back) == 0:
            return
        self.ring.give(pages, back)
        if self.poison:
            self._data[pages.where(back, self.capacity)] = _POISON

    def ensure(self, most: int, need: Callable[[], Int[Tensor, ""]] | None = None) -> bool:
        """Promise pages to somebody who will `take` them later, and say how many.

        The lower bound decides. Only if it is below `most` does the host wait for the device, once,
        for the true number of free pages. If that is too small as well, a pool that grows does, by
        a sixteenth at least, and a fixed one asks for the number really needed next.

        Args:
            most: pages that may be taken before somebody asks the pool for anything else, as
                `promises` tells.
            need: gives the pages that the next call of `take` needs, those counted off that are
                given back before it. None: as many as `most`.

        Returns:
            Whether `most` pages are promised; otherwise only what `need` gave.

        Raises:
            PoolExhausted: not even those are free, and the pool may not grow; nothing has changed.
        """
        self._promises += 1
        if self._least < most:
            free = self.ring.count
            known = [free] if need is None or self.grows else [free, need()]
            self._least, needed = [*torch.stack(known).tolist(), most][:2]
            if self._least < most and (self.grows or needed > self._least):
                self._grow_for(most if self.grows else needed, self.capacity // 16)
            elif self._least < most:
                self._least -= max(needed, 0)
                return False
        self._least -= most
        return True

    def reserve(self, free: int) -> None:
        """Make sure that `free` pages are free, growing by exactly what is missing.

        Raises:
            PoolExhausted: too few are free and the pool may not grow.
        """
        if free > self._least and self._look() < free:
            self._grow_for(free, 0)

    def shrink(self, held: Int[Tensor, " n"], free: int) -> Int[Tensor, " P1"]:
        """Give memory back until only so many pages are free; the others move together.

        While pages are copied to the smaller memory, both exist. The host waits for the device.

        Args:
            held: the pages in all tables over this pool, each once, in any order.
            free: pages that stay free, or all there are if these are fewer.

        Returns:
            The new id of each page there was, and of the scratch page; 0 for pages that are gone.

        Raises:
            ValueError: the pool may not grow, or a negative number of pages.
            RuntimeError: `held` are not the pages that are held; nothing has changed.
        """
        if not self.grows:
            raise ValueError("a pool that cannot grow cannot shrink; let it grow, or keep its size")
        if free < 0:
            raise ValueError(f"{free} pages cannot stay free; name 0 or more")
        self.check(held)
        new = min(held.shape[0] + free, self.capacity)
        if new == self.capacity:
            return torch.arange(new + 1, device=self.device)
        plan = together(held.long(), self.capacity, new)
        copy_pages(self._data, plan.source, plan.target)
        # One page more than stays becomes the scratch page, whatever it held.
        self._data, self._least = self._data[: new + 1].clone(), len(plan.free)
        count = torch.full_like(self.ring.count, self._least)
        self.ring = FreeList.of(plan.free, new, count)
        self._promises += 1
        return plan.ids

    def check(self, held: Int[Tensor, " n"]) -> None:
        """Check that free pages and held ones (those in all tables) are all pages, each once.

        Raises:
            RuntimeError: a page is missing, or is in two places.
        """
        expect_each_once(self.ring.first(self.free), held.long().to(self.device), self.capacity)

    def _look(self) -> int:
        """Read how many are free, with those that were promised and not taken yet."""
        self._promises += 1
        self._least = self.free
        return self._least

    def _grow_for(self, count: int, step: int) -> None:
        if not self.grows:
            raise PoolExhausted(count, self._least)
        self._grow(max(count - self._least, step), self._least)

    def _grow(self, more: int, free: int) -> None:
        """Add pages; `free` is the number of those there are."""
        old, new = self.capacity, self.capacity + more
        data = torch.zeros(new + 1, self.page_bytes, dtype=torch.uint8, device=self.device)
        data[:old] = self._data[:old]
        if self.poison:
            data[old:] = _POISON
        # The run of free ids is laid out anew from 0: the old one may wrap at the old capacity.
        more_ids = torch.arange(old, new, device=self.device)
        ids = torch.cat((self.ring.first(free), more_ids))
        self._data, self.ring = data, FreeList.of(ids, new, self.ring.count + more)
        self._least = free + more
