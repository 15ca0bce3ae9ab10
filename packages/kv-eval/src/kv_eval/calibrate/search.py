"""Evaluation of settings on tasks, and the choice among them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from kv_eval.calibrate.grid import Setting
from kv_eval.calibrate.loss import Loss, loss
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.runner import run
from kv_eval.tasks import TaskName, Text
from kv_policy.files import write_whole
from kv_transformers.from_text import FULL, MakeCache

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel


@runtime_checkable
class Tried(Protocol):
    """A setting to evaluate."""

    @property
    def spec(self) -> str:
        """The policy's text form."""
        ...


S = TypeVar("S", bound=Tried)


@dataclass(frozen=True, slots=True)
class Point(Generic[S]):
    """One setting with its loss on each task and its bytes."""

    setting: S
    losses: Mapping[str, Loss]
    ratio: float  # cache bytes after the prompts over those of the full cache

    @property
    def worst(self) -> float:
        """The greatest loss over the tasks, as a share of the full cache's score."""
        return max(found.share for found in self.losses.values())

    def within(self, allowed: float) -> bool:
        """Return whether the loss on every task is within that share, or within noise."""
        return all(found.within(allowed) for found in self.losses.values())


@dataclass(frozen=True)
class Search(Generic[S]):
    """Settings, and the samples to evaluate them on."""

    settings: tuple[S, ...]
    tasks: tuple[TaskName, ...]
    length: int = 2000
    samples: int = 10
    seed: int = 0
    batch: int = 4
    continuation: int = 64

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Tasks with a question inside the prompt, as in the paper, and those without one."""
        asks = tuple(t for t in self.tasks if t in ("needle", "multikey"))
        reads = tuple(t for t in self.tasks if t not in asks)
        whole = Plan(
            policies=(FULL, *(setting.spec for setting in self.settings)),
            tasks=asks,
            settings=("aware",),
            length=self.length,
            samples=self.samples,
            seed=self.seed,
            batch=self.batch,
            continuation=self.continuation,
        )
        found = (whole, replace(whole, tasks=reads, settings=("agnostic",)))
        return tuple(plan for plan in found if plan.tasks)

    @property
    def total(self) -> int:
        """Number of samples to run, including those of the full cache."""
        return (1 + len(self.settings)) * len(self.tasks) * self.samples

    def run(
        self, loaded: "LoadedModel", text: Text, journal: Journal, make: MakeCache | None = None
    ) -> Iterator[Finished]:
        """Run every sample that the journal does not have yet."""
        for plan in self.plans:
            yield from run(loaded, plan, text, journal, make)

    @property
    def baseline(self) -> "Search[S]":
        """The same samples with the full cache alone."""
        return replace(self, settings=())

    def unanswered(self, journal: Journal) -> str | None:
        """Return a task on which the full cache scores 0, so that no loss can show."""
        for plan in self.plans:
            for task, where in plan.pairs:
                done = [journal.get(FULL, task, where, i) for i in range(self.samples)]
                if not any(entry.score for entry in done if entry is not None):
                    return task
        return None

    def points(self, journal: Journal) -> tuple[Point[S], ...]:
        """Summarize a journal that has every sample."""
        return tuple(self._point(setting, journal) for setting in self.settings)

    def _point(self, setting: S, journal: Journal) -> Point[S]:
        losses: dict[str, Loss] = {}
        ratios = []
        for plan in self.plans:
            for task, where in plan.pairs:
                mine, full = (
                    [journal.get(spec, task, where, i) for i in range(self.samples)]
                    for spec in (setting.spec, FULL)
                )
                done = [(a, b) for a, b in zip(mine, full, strict=True) if a and b]
                losses[task] = loss([a.score for a, _ in done], [b.score for _, b in done], task)
                ratios.append(fmean(a.kv_bytes / a.full_bytes for a, _ in done))
        return Point(setting, losses, fmean(ratios))


def frontier(points: Sequence[Point[S]]) -> list[Point[S]]:
    """Return the points that no other beats in bytes and loss, fewest bytes first."""
    best = float("inf")
    found = []
    for point in sorted(points, key=lambda p: (p.ratio, p.worst)):
        if point.worst < best:
            best = point.worst
            found.append(point)
    return found


def choose(points: Sequence[Point[S]], allowed: float) -> Point[S] | None:
    """Return the point with the fewest bytes within the allowed loss; None if there is none."""
    good = [point for point in points if point.within(allowed)]
    return min(good, key=lambda p: (p.ratio, p.worst), default=None)


def write_profile(
    path: Path, point: Point[Setting], model: str, fingerprint: str, max_loss: float, length: int
) -> None:
    """Write a profile for `leankv:profile=FILE` atomically."""
    data = {
        "format": "leankv profile 1",
        "model": model,
        "fingerprint": fingerprint,
        **{name: getattr(point.setting, name) for name in Setting.__dataclass_fields__},
        "max_loss": max_loss,
        "tasks": tuple(point.losses),
        "length": length,
        "bytes_ratio": round(point.ratio, 6),
    }
    write_whole(path, msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
