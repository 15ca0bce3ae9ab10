"""A pool of fixed-size byte pages with a ring buffer of the free ones."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from kv_paging.checks import PoolExhausted, expect_each_once, expect_memory, expect_sizes
from kv_paging.free_list import FreeList, moved_out, together
from kv_paging.huge_pages import back_with_huge_pages
from kv_paging.moves import copy_pages
from kv_paging.owners import Owners

_POISON = 0xFF  # as float16, bfloat16 or float32 these bytes are NaN


class PagePool:
    """Fixed-size byte pages; the pool tracks the free pages, not the contents of the others.

    The ids of the free pages are one contiguous range of a ring buffer: allocation advances its
    start and release appends at its end, so any number of pages is allocated or released at once,
    and a prefix sum over the requested counts assigns the pages (LeanKV section 5.2).

    The ring buffer, its start and the number of free pages are on the device. The host knows a
    lower bound of that number. `take` and `give` leave the number of pages to the device, and never
    synchronize; `allocate` and `release` are for a number known to the host. The host reads the
    true number, and synchronizes, in `free`, `used` and `check`, and in `allocate`, `reserve` and
    `ensure` if the lower bound is below the requested number.

    Several table rows may hold a page that none of them writes to (`share`); `release` then counts
    them, and synchronizes.
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
        """Create `pages` free pages of `page_bytes` bytes.

        Args:
            page_bytes: bytes of one page.
            pages: initial number of pages.
            grows: allocate more memory when no page is free, instead of raising PoolExhausted.
            device: the device of the pages and the free list.
            poison: fill free pages with NaN bytes, so that tests detect reads of them.
            kernels: name of the page kernels, see `kernels.select_page_kernels`; None: native code
                on a CPU, or Triton on a GPU, if installed and supported, else torch.

        Raises:
            ValueError: a page of no bytes, a negative number of pages, or none in a fixed pool.
        """
        expect_sizes(page_bytes, pages, grows)
        self.page_bytes = page_bytes
        self.grows = grows
        self.kernels = kernels
        self.poison = poison
        self._data = torch.zeros(1, page_bytes, dtype=torch.uint8, device=device)
        none = torch.zeros((), dtype=torch.long, device=device)
        self.ring = FreeList.of(none[None], 0, none)
        self._owners: Owners | None = None  # None: no page has several
        self._least = 0
        self._promises = 0
        self._grow(pages, 0)

    @classmethod
    def over(
        cls,
        data: UInt8[Tensor, "P1 N"],
        *,
        free: bool = True,
        poison: bool = False,
        kernels: str | None = None,
    ) -> "PagePool":
        """Create a pool over external memory: each row is a page, and the last the scratch page.

        No page is cleared or copied. The pool never grows.

        Args:
            data: the memory; rows may have gaps between them, each is contiguous.
            free: whether all pages are free. If not, all belong to others: `release` adds pages to
                the pool, and `withdraw` removes them.
            poison: as in the constructor; free pages are all of `data`, or none.
            kernels: as in the constructor.

        Raises:
            ValueError: fewer than two rows, overlapping or non-contiguous rows, or no bytes.
        """
        expect_memory(data)
        pool = cls(data.shape[1], device=data.device, poison=poison, kernels=kernels)
        pages = len(data) - 1
        pool._data, pool.grows, pool._least = data, False, pages if free else 0
        first = torch.arange(pool._least, device=data.device)
        pool.ring = FreeList.of(first, pages, pool.ring.count + pool._least)
        if poison and free:
            data.fill_(_POISON)
        return pool

    @property
    def data(self) -> UInt8[Tensor, "P page_bytes"]:
        """The bytes of all pages; growth replaces this tensor, so do not keep a reference."""
        return self._data[:-1]

    @property
    def padded(self) -> UInt8[Tensor, "P1 page_bytes"]:
        """All pages, followed by a scratch page for masked writes."""
        return self._data

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self._data.device

    @property
    def capacity(self) -> int:
        """Number of pages; as a page id, the scratch page of `padded`."""
        return self._data.shape[0] - 1

    @property
    def free(self) -> int:
        """Number of free pages; synchronizes with the device."""
        return int(self.ring.count)

    @property
    def used(self) -> int:
        """Number of held pages; synchronizes with the device."""
        return self.capacity - self.free

    @property
    def least_free(self) -> int:
        """A lower bound of the free, unreserved pages, known without synchronizing."""
        return self._least

    @property
    def promises(self) -> int:
        """A number that changes when earlier reservations of `ensure` are no longer valid."""
        return self._promises

    @property
    def held_bytes(self) -> int:
        """Bytes of all pages, including free ones and external memory."""
        return self.capacity * self.page_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes besides the pages: free list with its ends, scratch page, and counts of owners."""
        owners = 0 if self._owners is None else self._owners.nbytes
        return self.page_bytes + self.ring.nbytes + owners

    @property
    def shares(self) -> bool:
        """Whether a page may have several owners."""
        return self._owners is not None

    def share(self, pages: Int[Tensor, " n"]) -> None:
        """Count a further owner for each page named, which is not written to while it has several.

        Each owner releases it once.
        """
        if self._owners is None:
            self._owners = Owners.of(self.capacity, self.device)
        self._owners.add(pages)

    def shared(self, pages: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Return which pages have several owners."""
        if self._owners is None:
            return torch.zeros_like(pages, dtype=torch.bool)
        return self._owners.more[pages] > 0

    def freed_by(self, pages: Int[Tensor, " n"]) -> int:
        """Return how many pages are free after `release`; synchronizes if the pool shares some."""
        return len(pages) if self._owners is None else self._owners.freed_by(pages)

    def to_copy(self, pages: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Return which pages named must be copied, so that each is written to by one owner alone.

        If all owners name a page, the first keeps it.
        """
        if self._owners is None:
            return torch.zeros_like(pages, dtype=torch.bool)
        return self._owners.to_copy(pages)

    def allocate(self, count: int) -> Int[Tensor, " count"]:
        """Allocate `count` pages and return their ids, in the order in which they were freed.

        A pool that grows and has too few pages adds the missing ones, at least a sixteenth of its
        size, so that pages are rarely copied; during growth, old and new pages both exist.

        Raises:
            PoolExhausted: too few are free and the pool may not grow.
            ValueError: a negative count.
        """
        if count < 0:
            raise ValueError(f"{count} pages cannot be allocated; request 0 or more")
        self._promises += 1
        if count > self._least and self._look() < count:
            self._grow_for(count, self.capacity // 16)
        pages = self.ring.first(count)
        self.ring.skip(count)
        self._least -= count
        return pages

    def release(self, pages: Int[Tensor, " n"]) -> None:
        """Release pages, each named once for every owner that gives it up.

        `check` detects violations.

        Raises:
            ValueError: more pages than can be held.
        """
        if self._owners is not None:
            pages = self._owners.drop(pages)
            self._owners = self._owners if self._owners.more.any() else None
        count, most = pages.shape[0], self.capacity - self._least
        if count > most:
            raise ValueError(f"{count} pages are released and only {most} are held")
        if count == 0:
            return
        self._promises += 1
        self.ring.add(pages)
        self._least += count
        if self.poison:
            self._data[pages] = _POISON

    def take(self, wanted: Bool[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Allocate a page for each marked row, without synchronizing; call `ensure` before.

        Rows that are not marked get the scratch page of `padded`.
        """
        return self.ring.take(wanted) if len(wanted) else wanted.long()

    def give(self, pages: Int[Tensor, " S"], back: Bool[Tensor, " S"]) -> None:
        """Release the page of each marked row, which must be held, without synchronizing."""
        if len(back) == 0:
            return
        self.ring.give(pages, back)
        if self.poison:
            self._data[pages.where(back, self.capacity)] = _POISON

    def ensure(self, most: int, need: Callable[[], Int[Tensor, ""]] | None = None) -> bool:
        """Reserve pages for later calls of `take`, and return whether all of them are reserved.

        The lower bound decides. Only if it is below `most` does the host synchronize, once, to read
        the true number of free pages. If that is too small as well, a growing pool grows by at
        least a sixteenth, and a fixed one falls back to the number returned by `need`.

        Args:
            most: pages that may be allocated before any other request to the pool, as tracked by
                `promises`.
            need: returns the pages that the next call of `take` needs, minus those released before
                it. None: as many as `most`.

        Returns:
            Whether `most` pages are reserved; otherwise only the number returned by `need`.

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
        """Ensure that `free` pages are free, growing by exactly the missing number.

        Raises:
            PoolExhausted: too few are free and the pool may not grow.
        """
        if free > self._least and self._look() < free:
            self._grow_for(free, 0)

    def shrink(self, held: Int[Tensor, " n"], free: int) -> Int[Tensor, " P1"]:
        """Shrink the memory to `free` free pages, and move the held pages together.

        While pages are copied to the smaller memory, both exist. Synchronizes with the device.

        Args:
            held: the pages in all tables over this pool, in any order.
            free: number of pages that remain free, or all free pages if these are fewer.

        Returns:
            The new id of each former page, and of the scratch page; 0 for removed pages.

        Raises:
            ValueError: the pool may not grow, or a negative number of pages.
            RuntimeError: `held` are not exactly the held pages; nothing has changed.
        """
        if not self.grows:
            raise ValueError("a pool that cannot grow cannot shrink; let it grow, or keep its size")
        if free < 0:
            raise ValueError(f"{free} pages cannot stay free; use 0 or more")
        self.check(held)
        if self._owners is not None:
            held = self._owners.once(held.long())
        new = min(held.shape[0] + free, self.capacity)
        if new == self.capacity:
            return torch.arange(new + 1, device=self.device)
        plan = together(held.long(), self.capacity, new)
        copy_pages(self._data, plan.source, plan.target)
        # The page after the remaining ones becomes the scratch page.
        self._data, self._least = self._data[: new + 1].clone(), len(plan.free)
        if self._owners is not None:
            self._owners = self._owners.moved(plan.ids, new)
        count = torch.full_like(self.ring.count, self._least)
        self.ring = FreeList.of(plan.free, new, count)
        self._promises += 1
        return plan.ids

    def withdraw(self, pages: Int[Tensor, " n"]) -> Int[Tensor, " P1"] | None:
        """Remove pages from the pool, and move the held ones among them to other pages.

        They belong to others until they are released to the pool again; their bytes are left as
        they are. Synchronizes.

        Args:
            pages: pages that are free or in tables, each named once, in any order.

        Returns:
            The new id of each page, and of the scratch page; None: no page has moved.

        Raises:
            PoolExhausted: fewer other pages are free than held ones would move; nothing has
                changed.
        """
        plan = moved_out(self.ring.first(self._look()), pages.long(), self.capacity)
        copy_pages(self._data, plan.source, plan.target)
        if self._owners is not None:
            self._owners = self._owners.moved(plan.ids, self.capacity)
        self._least = len(plan.free)
        self.ring.set(plan.free)
        return plan.ids if len(plan.source) else None

    def check(self, held: Int[Tensor, " n"]) -> None:
        """Check that free and held pages (those in all tables) are all pages.

        Raises:
            RuntimeError: a page is missing, or occurs more often than it has owners.
        """
        held = held.long().to(self.device)
        if self._owners is not None:
            held = self._owners.once(held)
        expect_each_once(self.ring.first(self.free), held, self.capacity)

    def _look(self) -> int:
        """Read the number of free pages, including those reserved and not allocated yet."""
        self._promises += 1
        self._least = self.free
        return self._least

    def _grow_for(self, count: int, step: int) -> None:
        if not self.grows:
            raise PoolExhausted(count, self._least)
        self._grow(max(count - self._least, step), self._least)

    def _grow(self, more: int, free: int) -> None:
        """Add pages; `free` is the number of free pages before."""
        old, new = self.capacity, self.capacity + more
        data = torch.empty(new + 1, self.page_bytes, dtype=torch.uint8, device=self.device)
        back_with_huge_pages(data)
        data[:old] = self._data[:old]
        data[old:] = 0
        if self.poison:
            data[old:] = _POISON
        # Copy the range of free ids to 0: the old one may wrap at the old capacity.
        more_ids = torch.arange(old, new, device=self.device)
        if self._owners is not None:
            self._owners = self._owners.moved(torch.arange(old, device=self.device), new)
        ids = torch.cat((self.ring.first(free), more_ids))
        self._data, self.ring = data, FreeList.of(ids, new, self.ring.count + more)
        self._least = free + more
