"""Measurement of the memory that a worker's requests hold, every few steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging import PagePool
from kv_policy import CacheShape
from kv_runtime.batch import Batch
from kv_runtime.copies import HostCopy
from kv_runtime.stats import Tally

EVERY: Final = 16  # steps; a measurement reads three numbers per request with one synchronization


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory held after a step, and the plans since the last measurement."""

    pages_used: int  # of requests; those of stored prefixes are counted by `prefix_bytes`
    pages_free: int
    held_bytes: int  # used pages, including raw windows
    full_bytes: int  # the requests' tokens uncompressed
    kept: int  # kept tokens, summed over layers and KV heads
    table_rows: int  # layers times KV heads
    computed: int  # tokens of the requests, kept or evicted
    plans: int
    seconds: float  # spent in planning
    dropped: int = 0  # tokens evicted since the last measurement, summed over layers and KV heads
    saved: int = 0  # bytes saved since then, see `Meter`
    prefix_bytes: int = 0  # of stored prefixes
    prefix_hits: int = 0  # requests that continued one since the last measurement
    prefix_tokens: int = 0  # tokens that these did not read
    # Of an earlier measurement with memory held, after which none is:
    earlier_computed: int = 0
    earlier_held_bytes: int = 0
    earlier_full_bytes: int = 0

    def beside(self, other: "Measured") -> "Measured":
        """Add a worker with other heads, but the same requests and plans."""
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
            prefix_bytes=self.prefix_bytes + other.prefix_bytes,
            prefix_hits=max(self.prefix_hits, other.prefix_hits),
            prefix_tokens=max(self.prefix_tokens, other.prefix_tokens),
            earlier_computed=max(self.earlier_computed, other.earlier_computed),
            earlier_held_bytes=self.earlier_held_bytes + other.earlier_held_bytes,
            earlier_full_bytes=self.earlier_full_bytes + other.earlier_full_bytes,
        )

    def then(self, later: "Measured") -> "Measured":
        """Combine with a later measurement: gauges are replaced, counters are summed.

        Ratios are those of the last of the two with memory held.
        """
        computed, held, full = self._held()
        return replace(
            later,
            earlier_computed=computed,
            earlier_held_bytes=held,
            earlier_full_bytes=full,
            plans=self.plans + later.plans,
            seconds=self.seconds + later.seconds,
            dropped=self.dropped + later.dropped,
            saved=self.saved + later.saved,
            prefix_hits=self.prefix_hits + later.prefix_hits,
            prefix_tokens=self.prefix_tokens + later.prefix_tokens,
        )

    def gauges(self) -> dict[str, int | float]:
        """Return the gauges by name; ratios only if memory is or was held."""
        sums: dict[str, int | float] = {
            "tokens_computed": self.computed,
            "tokens_kept": self.kept / self.table_rows,
            "pages_used": self.pages_used,
            "pages_free": self.pages_free,
            "prefix_bytes": self.prefix_bytes,
        }
        computed, held, full = self._held()
        if not computed or not held:
            return sums
        return sums | {"kv_bytes_per_token": held / computed, "compression_ratio": full / held}

    def _held(self) -> tuple[int, int, int]:
        """Return tokens computed, bytes held and uncompressed bytes, when memory was last held."""
        if self.computed and self.held_bytes:
            return self.computed, self.held_bytes, self.full_bytes
        return self.earlier_computed, self.earlier_held_bytes, self.earlier_full_bytes

    def counters(self) -> dict[str, int | float]:
        """Return the counters since the last measurement, by name."""
        return {
            "compression_passes": self.plans,
            "compression_seconds": self.seconds,
            "tokens_dropped": self.dropped / self.table_rows,
            "bytes_saved": self.saved,
            "prefix_hits": self.prefix_hits,
            "prefix_tokens": self.prefix_tokens,
        }


class RequestHeld(NamedTuple):
    """A request's pages and tokens after a step."""

    pages: int  # those of stored prefixes not counted
    computed: int  # tokens
    kept: int  # kept tokens, summed over layers and KV heads


@dataclass(slots=True)
class Meter:
    """Measures a worker's memory and the plans of its caches.

    Evicted tokens and saved bytes of a request are recorded after each step; only increases above
    the request's previous maximum are added. So the sums never decrease, even if a new page reduces
    a request's saving for some steps.
    """

    shape: CacheShape
    tally: Tally
    steps: int = 0  # since a step without held memory
    told: Tally = field(default_factory=Tally)  # at the last measurement
    most: dict[int, tuple[int, int]] = field(default_factory=dict)  # evicted and saved, by serial
    dropped: int = 0  # since the last measurement
    saved: int = 0

    @property
    def table_rows(self) -> int:
        """Layers times KV heads."""
        return self.shape.layers * self.shape.kv_heads

    def step(
        self,
        pool: PagePool,
        held: Mapping[int, RequestHeld],
        beside: int = 0,
        *,
        read: bool = False,
    ) -> Measured | None:
        """End a step; measure after the first, every `EVERY` steps, and after large changes.

        Large changes are a finished prefill, a plan, and the release of all memory.

        Args:
            pool: the page pool.
            held: pages and tokens of requests, by serial.
            beside: pages of stored prefixes.
            read: whether a prefill finished in this step.

        Returns:
            None in a step without a measurement.
        """
        self._note(held, pool.page_bytes)
        was, self.steps = self.steps, self.steps + 1 if held else 0
        planned = self.tally.plans != self.told.plans
        due = was % EVERY == 0 or read or planned if held else was > 0
        return self._count(pool, held, beside) if due else None

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

    def _count(self, pool: PagePool, held: Mapping[int, RequestHeld], beside: int) -> Measured:
        pages = sum(each.pages for each in held.values())
        computed = sum(each.computed for each in held.values())
        found = Measured(
            pages_used=pages,
            pages_free=pool.capacity - pages - beside,
            held_bytes=pages * pool.page_bytes,
            full_bytes=computed * self.shape.token_bytes,
            kept=sum(each.kept for each in held.values()),
            table_rows=self.table_rows,
            computed=computed,
            plans=self.tally.plans - self.told.plans,
            seconds=self.tally.seconds - self.told.seconds,
            dropped=self.dropped,
            saved=self.saved,
            prefix_bytes=beside * pool.page_bytes,
        )
        self.told, self.dropped, self.saved = replace(self.tally), 0, 0
        return found


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """What requests hold after a step, on its way to the host."""

    names: tuple[str, ...]  # of the requests; "" where a sequence is of none
    numbers: HostCopy | None  # fields of `RequestHeld`, by request; None: there are no requests

    @classmethod
    def of(cls, names: Sequence[str], numbers: Sequence[Int[Tensor, "_ 3"]]) -> "HeldCopy":
        """Begin to copy the numbers of requests; the host does not wait."""
        return cls(tuple(names), HostCopy.of(torch.cat([*numbers])) if names else None)

    def read(self) -> dict[str, RequestHeld]:
        """Return what each request held, after waiting for that step."""
        if self.numbers is None:
            return {}
        rows = self.numbers.read().tolist()
        each = zip(self.names, rows, strict=True)
        return {name: RequestHeld(*row) for name, row in each if name}


def held_by(batch: Batch, *, kept: bool) -> list[RequestHeld]:
    """Return each sequence's pages and tokens, with one device synchronization.

    Args:
        batch: the sequences.
        kept: whether to count kept tokens; otherwise they are 0.
    """
    return [RequestHeld(*row) for row in held_numbers(batch, kept=kept).tolist()]


def held_numbers(batch: Batch, *, kept: bool) -> Int[Tensor, "B 3"]:
    """Return the fields of `RequestHeld` of each sequence, in new memory on the device."""
    pages, tokens = batch.pages_used() - batch.prefix_pages, torch.zeros_like(batch.seen)
    if kept:
        tokens = batch.tiers.counts().sum((0, 1, 3))
        if batch.window is not None:
            filled = (batch.window.position >= 0).sum(-1)
            tokens = tokens + filled * batch.shape.layers * batch.shape.kv_heads
    return torch.stack((pages, batch.seen, tokens), 1)
