"""Bounds of the keys in pages, or codes of them, and what is computed from these."""

from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

from kv_policy import PagedTokens, PageReading
from kv_policy.key_codes import BITS, LEVELS, code_rotation, code_rows

MOST_BYTE: Final = 127
DECODED: Final = 1 << 22  # numbers of keys that are decoded together


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Bounds of the keys in the first pages of each table row of `PagedTokens`.

    Attributes:
        both: the largest number of each channel in a page, then the smallest; by column of a table
            row, or by the number of a page in the table (`in_pages`). As uint8: the codes of its
            keys (`kv_policy.key_codes`).
        count: pages of a table row with bounds, from the first one on; others are always read.
        missing: at most so many full pages of a row have none, as the host knows; None: unknown.
    """

    both: (
        Float[Tensor, "B H T _"]
        | Float[Tensor, "P _"]
        | UInt8[Tensor, "B H T _"]
        | UInt8[Tensor, "P _"]
    )
    count: Int[Tensor, "B H"]
    missing: int | None = None

    @property
    def coded(self) -> bool:
        """Whether these are codes of keys."""
        return self.both.dtype == torch.uint8

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


def code_logits(
    q: Float[Tensor, "B H G D"], codes: UInt8[Tensor, "B H T _"], tokens: int
) -> Float[Tensor, "B H G T"]:
    """Return for each query and page the largest of the logits of its keys, from their codes.

    A query is rotated as keys are, and rounded to multiples of a 127th of its largest element.
    Computed as `logit_bounds`, some pages at a time.

    Args:
        q: the queries.
        codes: of the keys in each page (`kv_policy.key_codes`).
        tokens: keys in a page.
    """
    dim, columns = q.shape[3], codes.shape[2]
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    rotated = q @ code_rotation(dim, q.device).to(q.dtype)
    step = rotated.abs().amax(-1, keepdim=True) / MOST_BYTE
    rotated = (rotated / step.masked_fill(step == 0, 1)).round() * step
    found = q.new_empty((*q.shape[:3], columns))
    some = max(1, DECODED // max(1, q.shape[0] * q.shape[1] * tokens * dim))
    for at in range(0, columns, some):
        key = decoded_keys(codes[:, :, at : at + some], dim, tokens).to(q.dtype)
        logits = rotated @ key.flatten(2, 3).mT
        found[..., at : at + some] = logits.unflatten(-1, (-1, tokens)).amax(-1)
    return found


def decoded_keys(
    codes: UInt8[Tensor, "B H T _"], dim: int, tokens: int
) -> Float32[Tensor, "B H T L D"]:
    """Decode the codes of keys, which are rotated; each number is exact."""
    rows, lead = code_rows(dim), codes.shape[:3]
    packed = codes[..., : 4 * rows * tokens].reshape(*lead, rows, tokens, 1, 4)
    shift = torch.arange(0, 8, BITS, dtype=torch.uint8, device=codes.device)[:, None]
    code = (packed >> shift) & (LEVELS - 1)  # rows, tokens, planes, bytes
    level = (2.0 * code - (LEVELS - 1)).transpose(3, 4).flatten(4)[..., :dim]
    scale = codes[..., 4 * rows * tokens :].contiguous().view(torch.float16).float()
    return level * scale[..., None]


def page_scores(
    q: Float[Tensor, "B H G D"], bounds: PageBounds, columns: int, tokens: int
) -> Float[Tensor, "B H _"]:
    """Return scores of the first pages by which those to read are selected, for each KV head.

    The score is how close the bound comes to the largest bound of a query, for the query of the
    group where it comes closest: every query of the group has its best pages read first, whatever
    the size of its logits. It is infinite for a page without bounds, or whose bound is not a
    number. With codes the largest logit of `tokens` keys is in the place of a bound.
    """
    width = min(columns, bounds.both.shape[2])
    both = bounds.both[:, :, :width]
    found = code_logits(q, both, tokens) if bounds.coded else logit_bounds(q, both)
    without = torch.arange(columns, device=q.device) >= bounds.count[..., None]
    found = found.masked_fill(without[:, :, None, :width], -torch.inf)
    score = torch.full(without.shape, torch.inf, dtype=found.dtype, device=q.device)
    if width:
        numbers = found.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = numbers.amax(-1, keepdim=True).clamp(min=torch.finfo(found.dtype).min)
        score[..., :width] = (found - best).amax(2)
    return score.masked_fill_(without, torch.inf).nan_to_num_(torch.inf, torch.inf, -torch.inf)
