"""Bounds of the keys in pages, and what is computed from them."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import PagedTokens, PageReading


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Bounds of the keys in the first pages of each table row of `PagedTokens`.

    Attributes:
        both: the largest number of each channel in a page, then the smallest; by column of a table
            row, or by the number of a page in the table (`in_pages`).
        count: pages of a table row with bounds, from the first one on; others are always read.
        missing: at most so many full pages of a row have none, as the host knows; None: unknown.
    """

    both: Float[Tensor, "B H T _"] | Float[Tensor, "P _"]
    count: Int[Tensor, "B H"]
    missing: int | None = None

    @property
    def in_pages(self) -> bool:
        """Whether bounds are found by the number of a page."""
        return self.both.ndim == 2

    def by_column(self, pages: PagedTokens, columns: int) -> "PageBounds":
        """Return a copy of the bounds of the first columns of each table row, if they are in pages.

        Those of columns without bounds are of any page.
        """
        if not self.in_pages:
            return self
        width = pages.table.shape[2]
        column = torch.arange(min(columns, width), device=pages.table.device)
        known = column < self.count[..., None]
        at = width - 1 - column if pages.reverse else column
        page = pages.table[:, :, at].long().where(known, 0)
        return replace(self, both=self.both[page])


@runtime_checkable
class SelectPages(Protocol):
    """A backend's selection of the pages that a decode step reads."""

    def __call__(
        self,
        q: Float[Tensor, "B H G D"],
        pages: PagedTokens,
        bounds: PageBounds,
        reading: PageReading,
    ) -> PagedTokens | None:
        """Select as `kv_attention.select_pages` does; None: torch does it."""
        ...


def logit_bounds(
    q: Float[Tensor, "B H G D"], both: Float[Tensor, "B H T _"]
) -> Float[Tensor, "B H G T"]:
    """Return for each query and page a number that no product of the query and a key exceeds.

    Computed in float32, or float64 for queries in float64; exact up to the rounding of that sum.
    """
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    signed = torch.cat((q.clamp(min=0), q.clamp(max=0)), -1)
    return signed @ both.to(q.dtype).mT


def page_scores(
    q: Float[Tensor, "B H G D"], bounds: PageBounds, columns: int
) -> Float[Tensor, "B H _"]:
    """Return scores of the first pages by which those to read are selected, for each KV head.

    The score is how close the bound comes to the largest bound of a query, for the query of the
    group where it comes closest: every query of the group has its best pages read first, whatever
    the size of its logits. It is infinite for a page without bounds, or whose bound is not a
    number.
    """
    width = min(columns, bounds.both.shape[2])
    found = logit_bounds(q, bounds.both[:, :, :width])
    without = torch.arange(columns, device=q.device) >= bounds.count[..., None]
    found = found.masked_fill(without[:, :, None, :width], -torch.inf)
    score = torch.full(without.shape, torch.inf, dtype=found.dtype, device=q.device)
    if width:
        numbers = found.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = numbers.amax(-1, keepdim=True).clamp(min=torch.finfo(found.dtype).min)
        score[..., :width] = (found - best).amax(2)
    return score.masked_fill_(without, torch.inf).nan_to_num_(torch.inf, torch.inf, -torch.inf)
