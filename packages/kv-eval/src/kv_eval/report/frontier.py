"""Measurements as points, and the Pareto frontier among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_eval.evaluate.report import Row
from kv_eval.report.read import Source
from kv_transformers.from_text import FULL

LOWER: Final = frozenset({"nll"})  # tasks whose score is a loss
EQUAL: Final = 0.02  # of the full cache's bytes: a frontier would be a vertical line
Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Point:
    """One policy of one file on one task.

    Attributes:
        number: of the policy of that file, from 1; the same throughout the page.
        source: index of the file, from 0.
        row: the measurements.
        best: whether it is on the frontier of its panel.
        times: seconds over those of `full` in the same file, task, setting and length; None if
            either was not measured.
    """

    number: int
    source: int
    row: Row
    best: bool
    times: float | None

    @property
    def share(self) -> float:
        """Cache bytes as a share of the full cache's."""
        return share(self.row)

    @property
    def quality(self) -> float:
        """The score; for a loss, the difference to the full cache's."""
        return quality(self.row)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the quality; None if unknown."""
        return self.row.change_interval if self.row.task in LOWER else self.row.score_interval


@dataclass(frozen=True, slots=True)
class Panel:
    """Comparable points: one task, in one setting, at one length."""

    task: str
    setting: str
    length: int
    points: tuple[Point, ...]

    @property
    def lower(self) -> bool:
        """Whether lower scores are better."""
        return self.task in LOWER

    @property
    def equal(self) -> bool:
        """Whether several policies other than `full` hold about the same bytes."""
        held = [point.share for point in self.points if point.row.policy != FULL]
        return len(held) > 1 and max(held) - min(held) <= EQUAL

    @property
    def frontier(self) -> tuple[Point, ...]:
        """The Pareto-optimal points, from fewest bytes to most."""
        sign = 1 if self.lower else -1
        best = [point for point in self.points if point.best]
        return tuple(sorted(best, key=lambda p: (p.share, sign * p.quality)))


def share(row: Row) -> float:
    """Return the cache bytes as a share of the full cache's."""
    return row.kv_bytes / row.full_bytes


def quality(row: Row) -> float:
    """Return the score; for a loss, the difference to the full cache's."""
    return row.score - row.full_score if row.task in LOWER else row.score


def pareto(places: Sequence[Place], *, lower: bool) -> tuple[bool, ...]:
    """Return for each point whether it is on the frontier.

    A point is, unless another one has no more bytes and no worse quality, and is better in one of
    them. Equal points are all on it, or none is.

    Args:
        places: shares of bytes, and qualities.
        lower: whether lower qualities are better.
    """
    sign = 1 if lower else -1
    found = [(held, sign * quality) for held, quality in places]
    return tuple(
        not any(o[0] <= one[0] and o[1] <= one[1] and o != one for o in found) for one in found
    )


def panels(sources: Sequence[Source]) -> tuple[Panel, ...]:
    """Group the rows of all files by comparability, in their order."""
    groups: dict[tuple[str, str, int], list[tuple[int, Row]]] = {}
    for i, source in enumerate(sources):
        for row in source.report.rows:
            groups.setdefault((row.task, row.setting, row.length), []).append((i, row))
    numbers = numbered(sources)
    return tuple(
        Panel(task, setting, length, _points(group, numbers))
        for (task, setting, length), group in groups.items()
    )


def numbered(sources: Sequence[Source]) -> dict[tuple[int, str], int]:
    """Number the policies of every file by file and name, from 1 in their order."""
    named = ((i, row.policy) for i, source in enumerate(sources) for row in source.report.rows)
    return {key: number for number, key in enumerate(dict.fromkeys(named), start=1)}


def _points(
    group: Sequence[tuple[int, Row]], numbers: dict[tuple[int, str], int]
) -> tuple[Point, ...]:
    lower = group[0][1].task in LOWER
    best = pareto([(share(row), quality(row)) for _, row in group], lower=lower)
    full = {source: row.seconds for source, row in group if row.policy == FULL}
    return tuple(
        Point(
            number=numbers[source, row.policy],
            source=source,
            row=row,
            best=on,
            times=_over(row.seconds, full.get(source, 0.0)),
        )
        for (source, row), on in zip(group, best, strict=True)
    )


def _over(seconds: float, full: float) -> float | None:
    return seconds / full if seconds > 0 and full > 0 else None
