"""Pages that several table rows hold, counted so that the last one releases them."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(slots=True)
class Owners:
    """The table rows that hold each page, beyond the first."""

    more: Int[Tensor, " P"]

    @classmethod
    def of(cls, pages: int, device: torch.device) -> "Owners":
        """Count no further row for each page."""
        return cls(torch.zeros(pages, dtype=torch.int32, device=device))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.more.numel() * self.more.itemsize

    def add(self, pages: Int[Tensor, " n"]) -> None:
        """Count a further row for each page named, as often as it is named."""
        self.more.index_add_(0, pages, torch.ones_like(pages, dtype=torch.int32))

    def drop(self, pages: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
        """Count a row less for each page named; return the pages that no row holds any more.

        Synchronizes with the device.
        """
        self.more.index_add_(0, pages, pages.new_full(pages.shape, -1, dtype=torch.int32))
        free: Tensor = pages[self.more[pages] < 0].unique()
        self.more[free] = 0
        return free

    def freed_by(self, pages: Int[Tensor, " n"]) -> int:
        """Return how many pages `drop` would return; synchronizes."""
        return int((torch.bincount(pages, minlength=len(self.more)) > self.more).sum())

    def once(self, held: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
        """Return the held pages, each once, if each is named as often as rows hold it.

        Raises:
            RuntimeError: a page is named more or less often.
        """
        named = torch.bincount(held, minlength=len(self.more))
        wrong = ((named != self.more + 1) & ((named > 0) | (self.more > 0))).nonzero()
        if len(wrong):
            page = int(wrong[0, 0])
            raise RuntimeError(
                f"page {page} is listed {int(named[page])} times as held, and "
                f"{int(self.more[page]) + 1} rows hold it; list it once for each"
            )
        return named.nonzero()[:, 0]

    def to_copy(self, pages: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Return which pages named must be copied before all of them are written to."""
        outside = torch.bincount(pages, minlength=len(self.more))[pages] <= self.more[pages]
        outside[repeated(pages)] = True
        return outside

    def moved(self, ids: Int[Tensor, " P1"], pages: int) -> "Owners":
        """Return the counts of `pages` pages after page i has become page ids[i]."""
        other = Owners.of(pages, self.more.device)
        held = self.more.nonzero()[:, 0]
        other.more[ids[held]] = self.more[held]
        return other


def repeated(pages: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
    """Return where in a list a page is named that was named before; synchronizes."""
    _, which = pages.unique(return_inverse=True)
    place = torch.arange(len(pages), device=pages.device)
    first = place.new_full((len(pages),), len(pages)).scatter_reduce(0, which, place, "amin")
    return (place != first[which]).nonzero()[:, 0]
