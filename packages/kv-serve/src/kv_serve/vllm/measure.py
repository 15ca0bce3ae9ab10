"""What workers hold for requests, counted every so many steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging import PagePool
from kv_policy import CacheShape
from kv_serve.batch import Batch
from kv_serve.tally import Tally

EVERY: Final = 16  # steps: the host reads three numbers from the device, and waits for it once


@dataclass(frozen=True, slots=True)
class Measured:
    """What is held after a step, and the plans since the last count."""

    pages_used: int
    pages_free: int
    held_bytes: int  # of pages in use, raw windows among them
    full_bytes: int  # what the requests' tokens would take uncompressed
    kept: int  # tokens, summed over layers and KV heads
    streams: int  # layers times KV heads
    computed: int  # tokens of the requests, whether kept or not
    plans: int
    seconds: float  # to plan

    def beside(self, other: "Measured") -> "Measured":
        """Add what a worker holds of other heads; it has the same requests and plans with me."""
        return Measured(
            pages_used=self.pages_used + other.pages_used,
            pages_free=self.pages_free + other.pages_free,
            held_bytes=self.held_bytes + other.held_bytes,
            full_bytes=self.full_bytes + other.full_bytes,
            kept=self.kept + other.kept,
            streams=self.streams + other.streams,
            computed=max(self.computed, other.computed),
            plans=max(self.plans, other.plans),
            seconds=max(self.seconds, other.seconds),
        )

    def then(self, later: "Measured") -> "Measured":
        """Let a later count replace this one, but for plans, which add up."""
        plans, seconds = self.plans + later.plans, self.seconds + later.seconds
        return replace(later, plans=plans, seconds=seconds)

    def gauges(self) -> dict[str, int | float]:
        """Give what is so after the step, by name; ratios only if something is held."""
        sums: dict[str, int | float] = {
            "tokens_computed": self.computed,
            "tokens_kept": self.kept / self.streams,
            "pages_used": self.pages_used,
            "pages_free": self.pages_free,
        }
        if not self.computed or not self.held_bytes:
            return sums
        return sums | {
            "kv_bytes_per_token": self.held_bytes / self.computed,
            "compression_ratio": self.full_bytes / self.held_bytes,
        }

    def counters(self) -> dict[str, int | float]:
        """Give what has happened since the last count, by name."""
        return {"compression_passes": self.plans, "compression_seconds": self.seconds}


@dataclass(slots=True)
class Meter:
    """Counts what a worker holds, and what its caches did."""

    shape: CacheShape
    tally: Tally
    steps: int = 0  # since a step that held nothing
    told: Tally = field(default_factory=Tally)  # as of the last count

    def step(self, pool: PagePool, batches: Sequence[Batch]) -> Measured | None:
        """End a step: count after the first, every `EVERY` steps, and when nothing is held again.

        Args:
            pool: where all pages lie.
            batches: of the requests that hold some.

        Returns:
            None in a step that does not count.
        """
        was, self.steps = self.steps, self.steps + 1 if batches else 0
        due = was % EVERY == 0 if batches else was > 0
        return self._count(pool, batches) if due else None

    def _count(self, pool: PagePool, batches: Sequence[Batch]) -> Measured:
        pages, kept, computed = 0, 0, 0
        if batches:
            counts = torch.stack([_counts(batch) for batch in batches]).sum(0)
            pages, kept, computed = counts.tolist()
        plans = self.tally.plans - self.told.plans
        seconds = self.tally.seconds - self.told.seconds
        self.told = replace(self.tally)
        return Measured(
            pages_used=pages,
            pages_free=pool.capacity - pages,
            held_bytes=pages * pool.page_bytes,
            full_bytes=computed * self.shape.token_bytes,
            kept=kept,
            streams=self.shape.layers * self.shape.kv_heads,
            computed=computed,
            plans=plans,
            seconds=seconds,
        )


def _counts(batch: Batch) -> Int[Tensor, "3"]:
    """Count pages, kept tokens over layers and heads, and computed tokens, without waiting."""
    kept = batch.tiers.counts().sum()
    if batch.window is not None:
        filled = (batch.window.position >= 0).sum()
        kept = kept + filled * batch.shape.layers * batch.shape.kv_heads
    return torch.stack([batch.pages_used().sum(), kept, batch.seen.sum()])
