"""Which pages of a KV head a decode step reads; what is stored does not depend on it."""

import math
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from kv_policy.budget import LARGEST, Budget


@dataclass(frozen=True, slots=True)
class PageReading:
    """A limit of the pages that a decode step reads of each KV head, in a layer and a sequence.

    Read are the pages in which some query of the head may find the largest logits, by bounds of
    the keys in a page (Tang et al. 2024, Quest), and pages that are always read. Prompts read all
    pages.

    Attributes:
        budget: stored tokens per KV head, in whole pages, or a percentage of its pages.
        first: pages with one of the first `first` stored tokens are always read.
        last: the same of the last ones. The page that new tokens are appended to is always read.
        whole_layers: number of first layers that read all pages.
    """

    budget: Budget
    first: int = 0
    last: int = 0
    whole_layers: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a number is negative, or the budget is in bytes.
        """
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
            most = min(LARGEST, math.ceil(amount / tokens))
            return held.clamp(max=most)
        if isinstance(amount, int):
            return (held * amount + 99) // 100
        share = (held.double() * amount / 100 - 1e-6).ceil()
        return share.to(held.dtype).minimum(held)
