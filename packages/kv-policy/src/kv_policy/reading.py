"""Which pages of a KV head a decode step reads; what is stored does not depend on it."""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from jaxtyping import Int
from torch import Tensor

from kv_policy.budget import LARGEST, Budget

RankedBy = Literal["bounds", "codes"]
NEAR: Final = 1e-6  # of a page: a share that is a whole number, but for rounding, is not rounded up


@dataclass(frozen=True, slots=True)
class PageReading:
    """A limit of the pages that a decode step reads of each KV head, in a layer and a sequence.

    Read are the pages in which some query of the head may find the largest logits, and pages that
    are always read. Pages are ranked by bounds of their keys (Tang et al. 2024, Quest), or by codes
    of each key. Prompts read all pages.

    Attributes:
        budget: stored tokens per KV head, in whole pages, or a percentage of its pages.
        first: pages with one of the first `first` stored tokens are always read.
        last: the same of the last ones. The page that new tokens are appended to is always read.
        whole_layers: number of first layers that read all pages.
        by: what ranks pages: "bounds", the largest and the smallest number of each channel of
            their keys, or "codes" of their keys (`kv_policy.key_codes`).
    """

    budget: Budget
    first: int = 0
    last: int = 0
    whole_layers: int = 0
    by: RankedBy = "bounds"

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a number is negative, the budget is in bytes, or nothing ranks pages so.
        """
        if self.by not in get_args(RankedBy):
            raise ValueError(f"by is {self.by!r}; pages are ranked by bounds or codes")
        if self.budget.unit == "bytes":
            raise ValueError(
                f"{self.budget} is a number of bytes; give tokens per KV head, such as 1024, or a "
                "share of the stored ones, such as 25%"
            )
        for name in ("first", "last", "whole_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more")

    def pages(self, held: Int[Tensor, "*B"], tokens: int) -> Int[Tensor, "*B"]:
        """Return how many of `held` pages of `tokens` tokens are read, rounded up."""
        amount = self.budget.amount
        if self.budget.unit == "tokens":
            return held.clamp(max=self.most_pages(tokens))
        if isinstance(amount, int):
            return (held * amount + 99) // 100
        share = (held.double() * amount / 100 - NEAR).ceil()
        return share.to(held.dtype).minimum(held)

    def pages_of(self, held: int, tokens: int) -> int:
        """Return `pages` of a number that the host has; it never falls as `held` grows."""
        most = min(held, self.most_pages(tokens))
        return most if self.share is None else min(most, math.ceil(held * self.share / 100 - NEAR))

    def most_pages(self, tokens: int) -> int:
        """Return the pages of `tokens` tokens that are read of any number; large for a share."""
        if self.budget.unit != "tokens":
            return LARGEST
        return min(LARGEST, math.ceil(self.budget.amount / tokens))

    @property
    def coded(self) -> bool:
        """Whether pages are ranked by codes."""
        return self.by == "codes"

    @property
    def share(self) -> float | None:
        """The percentage of the pages that is read; None for a number of tokens."""
        return float(self.budget.amount) if self.budget.unit == "percent" else None
