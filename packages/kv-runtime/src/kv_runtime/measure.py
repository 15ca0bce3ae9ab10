"""What workers hold for requests, counted every so many steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch

from kv_paging import PagePool
from kv_policy import CacheShape
from kv_runtime.batch import Batch
from kv_runtime.stats import Tally

EVERY: Final = 16  # steps: the host reads three numbers from the device, and waits for it once


@dataclass(frozen=True, slots=True)
class Measured:
    """What is held after a step, and the plans since the last count."""

    pages_used: int
    pages_free: int
    held_bytes: int  # of pages in use, raw windows among them
    full_bytes: int  # what the requests' tokens would take uncompressed
    kept: int  # tokens, summed over layers and KV heads
    table_rows: int  # layers times KV heads
    computed: int  # tokens of the requests, whether kept or not
    plans: int
    seconds: float  # to plan
    dropped: int = 0  # tokens since the last count, summed over layers and KV heads
    saved: int = 0  # bytes since then: see `Meter`

    def beside(self, other: "Measured") -> "Measured":
        """Add what a worker holds of other heads; it has the same requests and plans with me."""
        return Measured(
            pages_used=self.pages_used + other.pages_used,
            pages_free=self.pages_free + other.pages_free,
            held_bytes=self.held_bytes + other.held_bytes,
            full_bytes=self.full_bytes + other.full_bytes,
            kept=self.kept + other.kept,
            table_rows=self.table_rows + other.table_rows,
            computed=max(self.computed, other.computed),
            plans=max(self.plans, other.plans),
            seconds=max(self.seconds, other.seconds),
            dropped=self.dropped + other.dropped,
            saved=self.saved + other.saved,
        )

    def then(self, later: "Measured") -> "Measured":
        """Let a later count replace this one, but for what happened, which adds up."""
        return replace(
            later,
            plans=self.plans + later.plans,
            seconds=self.seconds + later.seconds,
            dropped=self.dropped + later.dropped,
            saved=self.saved + later.saved,
        )

    def gauges(self) -> dict[str, int | float]:
        """Give what is so after the step, by name; ratios only if something is held."""
        sums: dict[str, int | float] = {
            "tokens_computed": self.computed,
            "tokens_kept": self.kept / self.table_rows,
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
        return {
            "compression_passes": self.plans,
            "compression_seconds": self.seconds,
            "tokens_dropped": self.dropped / self.table_rows,
            "bytes_saved": self.saved,
        }


class RequestHeld(NamedTuple):
    """What a request holds after a step."""

    pages: int
    computed: int  # tokens
    kept: int  # of these, summed over layers and KV heads


@dataclass(slots=True)
class Meter:
    """Counts what a worker holds, and what its caches did.

    What has been dropped of a request, and what it saves, are noted after each step, and added as
    they rise above what was most for this request before. So a sum never falls, also where a new
    page makes a request save less for some steps.
    """

    shape: CacheShape
    tally: Tally
    steps: int = 0  # since a step that held nothing
    told: Tally = field(default_factory=Tally)  # as of the last count
    most: dict[int, tuple[int, int]] = field(default_factory=dict)  # dropped and saved, by serial
    dropped: int = 0  # since the last count
    saved: int = 0

    @property
    def table_rows(self) -> int:
        """Layers times KV heads."""
        return self.shape.layers * self.shape.kv_heads

    def step(
        self, pool: PagePool, held: Mapping[int, RequestHeld], *, read: bool = False
    ) -> Measured | None:
        """End a step, and count after the first, every `EVERY` steps, and where much changes.

        That is when a prompt has been read, when a plan was made, and when nothing is held again.

        Args:
            pool: where all pages lie.
            held: what requests hold, by the serial of the time that they began.
            read: whether a prompt has been read in this step.

        Returns:
            None in a step that does not count.
        """
        self._note(held, pool.page_bytes)
        was, self.steps = self.steps, self.steps + 1 if held else 0
        planned = self.tally.plans != self.told.plans
        due = was % EVERY == 0 or read or planned if held else was > 0
        return self._count(pool, held) if due else None

    def _note(self, held: Mapping[int, RequestHeld], page_bytes: int) -> None:
        before, self.most = self.most, {}
        for serial, each in held.items():
            dropped, saved = before.get(serial, (0, 0))
            now = (
                max(dropped, each.computed * self.table_rows - each.kept),
                max(saved, each.computed * self.shape.token_bytes - each.pages * page_bytes),
            )
            self.dropped, self.saved = self.dropped + now[0] - dropped, self.saved + now[1] - saved
            self.most[serial] = now

    def _count(self, pool: PagePool, held: Mapping[int, RequestHeld]) -> Measured:
        pages = sum(each.pages for each in held.values())
        computed = sum(each.computed for each in held.values())
        found = Measured(
            pages_used=pages,
            pages_free=pool.capacity - pages,
            held_bytes=pages * pool.page_bytes,
            full_bytes=computed * self.shape.token_bytes,
            kept=sum(each.kept for each in held.values()),
            table_rows=self.table_rows,
            computed=computed,
            plans=self.tally.plans - self.told.plans,
            seconds=self.tally.seconds - self.told.seconds,
            dropped=self.dropped,
            saved=self.saved,
        )
        self.told, self.dropped, self.saved = replace(self.tally), 0, 0
        return found


def held_by(batch: Batch, *, kept: bool) -> list[RequestHeld]:
    """Read what each sequence of a batch holds, which waits for the device once.

    Args:
        batch: the sequences.
        kept: whether to count kept tokens, too; else they are 0.
    """
    pages, tokens = batch.pages_used(), torch.zeros_like(batch.seen)
    if kept:
        tokens = batch.tiers.counts().sum((0, 1, 3))
        if batch.window is not None:
            filled = (batch.window.position >= 0).sum(-1)
            tokens = tokens + filled * batch.shape.layers * batch.shape.kv_heads
    return [RequestHeld(*row) for row in torch.stack((pages, batch.seen, tokens), 1).tolist()]
