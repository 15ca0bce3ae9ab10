"""A pool of equal byte pages with a circular list of the free ones."""

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

_POISON = 0xFF  # as float16, bfloat16 or float32 these bytes are NaN


class PoolExhausted(RuntimeError):
    """More pages were asked for than are free, and the pool may not grow; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        """Say how many pages were needed and how many there were."""
        super().__init__(
            f"{needed} pages are needed and {free} are free; give the pool more pages, keep fewer "
            "tokens, or finish a sequence first"
        )
        self.needed = needed
        self.free = free


class PagePool:
    """Equal byte pages for everybody; it knows which are free, and not what the others hold.

    The ids of the free pages are one contiguous, wrapping run of a ring: allocation advances its
    start, release appends at its end, so any number of pages is taken or given back at once, and a
    prefix sum over the takers' needs tells each which of them are its own (LeanKV section 5.2).
    """

    def __init__(
        self,
        page_bytes: int,
        pages: int = 0,
        *,
        grows: bool = True,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ) -> None:
        """Hold `pages` free pages of `page_bytes` bytes.

        Args:
            page_bytes: bytes of one page.
            pages: pages to begin with.
            grows: take more memory when no page is free; otherwise that is PoolExhausted.
            device: where the pages and the list of free ones live.
            poison: fill free pages with NaN bytes, so that a test sees when one is read.

        Raises:
            ValueError: a page of no bytes, fewer than no pages, or none in a pool that cannot grow.
        """
        if page_bytes < 1:
            raise ValueError(f"a page of {page_bytes} bytes holds nothing; give it at least 1")
        if pages < (0 if grows else 1):
            raise ValueError(
                f"a pool of {pages} pages cannot serve anybody; give it at least "
                f"{0 if grows else 1}, or let it grow"
            )
        self.page_bytes = page_bytes
        self.grows = grows
        self._poison = poison
        self._data = torch.empty(0, page_bytes, dtype=torch.uint8, device=device)
        self._ring = torch.empty(0, dtype=torch.int32, device=device)
        self._start = 0
        self._free = 0
        self._grow(pages)

    @property
    def data(self) -> UInt8[Tensor, "P page_bytes"]:
        """The bytes of all pages; growth replaces this tensor, so ask for it again each time."""
        return self._data

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._data.device

    @property
    def capacity(self) -> int:
        """Pages there are."""
        return self._data.shape[0]

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return self._free

    @property
    def used(self) -> int:
        """Pages somebody holds."""
        return self.capacity - self._free

    @property
    def held_bytes(self) -> int:
        """Memory of all pages, free ones included."""
        return self._data.numel()

    @property
    def table_bytes(self) -> int:
        """Memory of the list of free pages."""
        return self._ring.numel() * self._ring.itemsize

    def allocate(self, count: int) -> Int[Tensor, " count"]:
        """Take `count` pages and give their ids, in the order in which they became free.

        A pool that grows and has too few takes what is missing, and at least a sixteenth of what
        it has, so that the pages are copied rarely; while it grows, old and new pages both exist.

        Raises:
            PoolExhausted: too few are free and the pool may not grow.
            ValueError: a negative count.
        """
        if count < 0:
            raise ValueError(f"{count} pages cannot be taken; ask for 0 or more")
        missing = count - self._free
        if missing > 0:
            if not self.grows:
                raise PoolExhausted(count, self._free)
            self._grow(max(missing, self.capacity // 16))
        if count == 0:
            return self._ring[:0].long()
        pages = self._ring[self._places(self._start, count)].long()
        self._start = (self._start + count) % self.capacity
        self._free -= count
        return pages

    def release(self, pages: Int[Tensor, " n"]) -> None:
        """Give pages back; each must be held, and be named once. `check` finds who breaks this.

        Raises:
            ValueError: more pages than are held.
        """
        count = pages.shape[0]
        if count > self.used:
            raise ValueError(f"{count} pages are given back and only {self.used} are held")
        if count == 0:
            return
        self._ring[self._places(self._start + self._free, count)] = pages.to(self._ring.dtype)
        self._free += count
        if self._poison:
            self._data[pages] = _POISON

    def reserve(self, free: int) -> None:
        """Make sure that `free` pages are free, growing by exactly what is missing.

        Raises:
            PoolExhausted: too few are free and the pool may not grow.
        """
        missing = free - self._free
        if missing > 0:
            if not self.grows:
                raise PoolExhausted(free, self._free)
            self._grow(missing)

    def check(self, held: Int[Tensor, " n"]) -> None:
        """Check that the free pages and the held ones are all pages, each exactly once.

        Args:
            held: the pages in all tables over this pool, in any order.

        Raises:
            RuntimeError: a page is missing, or is in two places.
        """
        free = self._ring[self._places(self._start, self._free)].long()
        everywhere = torch.cat((free, held.long().to(self.device)))
        strange = everywhere[(everywhere < 0) | (everywhere >= self.capacity)]
        if len(strange):
            raise RuntimeError(f"page {int(strange[0])} does not exist; there are {self.capacity}")
        places = torch.bincount(everywhere, minlength=self.capacity)
        wrong = (places != 1).nonzero()
        if len(wrong):
            page = int(wrong[0, 0])
            raise RuntimeError(
                f"page {page} is in {int(places[page])} places; every page is either free or held "
                f"once ({self.free} are free, {len(held)} are named as held, {self.capacity} exist)"
            )

    def _places(self, start: int, count: int) -> Tensor:
        places = torch.arange(start, start + count, device=self.device)
        return places.remainder_(max(self.capacity, 1))

    def _grow(self, more: int) -> None:
        old, new = self.capacity, self.capacity + more
        data = torch.empty(new, self.page_bytes, dtype=torch.uint8, device=self.device)
        ring = torch.empty(new, dtype=torch.int32, device=self.device)
        data[:old] = self._data
        if self._poison:
            data[old:] = _POISON
        # The run of free ids is laid out anew from 0: the old one may wrap at the old capacity.
        ring[: self._free] = self._ring[self._places(self._start, self._free)]
        ring[self._free : self._free + more] = torch.arange(old, new, device=self.device)
        self._data, self._ring, self._start = data, ring, 0
        self._free += more
