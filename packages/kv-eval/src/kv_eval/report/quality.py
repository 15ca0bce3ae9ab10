"""The section on quality against cache bytes."""

from collections.abc import Sequence

from kv_eval.report.chart import Mark, chart, key
from kv_eval.report.frontier import Panel, Point
from kv_eval.report.markup import NOTHING, Markup, join, tag, text
from kv_eval.report.scale import Axis, axis
from kv_eval.report.table import Cell, Column, number, table, word
from kv_eval.report.words import HELD, facts, name, score_axis, title

_ABOUT = (
    "Every point is a policy, with its number in the table. Further left, a cache holds "
    "fewer bytes. Filled points, joined by the line, are the frontier: no other policy holds as "
    "few bytes and does as well."
)


def quality(panels: Sequence[Panel], files: tuple[str, ...]) -> Markup:
    """Draw the frontier of every panel, with a table below each."""
    return join(
        tag("p", None, text(_ABOUT)),
        key(files),
        *(_panel(panel, files) for panel in panels),
    )


def axes(panel: Panel) -> tuple[Axis, Axis]:
    """Return the axes of a panel: bytes from 0, shares from 0 to 1, losses from 0."""
    ends = (0.0,) if panel.lower else (0.0, 1.0)
    return (
        axis(HELD, [0.0, *(100 * point.share for point in panel.points)]),
        axis(score_axis(panel.task), [*ends, *(point.quality for point in panel.points)]),
    )


def _panel(panel: Panel, files: tuple[str, ...]) -> Markup:
    called = title(panel)
    x, y = axes(panel)
    picture = chart(
        f"{called}: {y.label}, against {x.label}",
        [_mark(point, panel, files) for point in panel.points],
        x,
        y,
        line=[(100 * point.share, point.quality) for point in panel.frontier],
    )
    return tag(
        "article",
        None,
        tag("h3", None, text(called)),
        _unequal(panel),
        tag("figure", None, picture),
        _table(panel, files),
    )


def _mark(point: Point, panel: Panel, files: tuple[str, ...]) -> Mark:
    return Mark(
        x=100 * point.share,
        y=point.quality,
        kind=point.source,
        filled=point.best,
        label=str(point.number),
        name=name(point, files),
        facts=facts(point, loss=panel.lower),
    )


def interval(of: tuple[float, float] | None) -> str:
    """Format a 95 % confidence interval; empty if unknown."""
    return "" if of is None else f"{of[0]:.3f}\N{EN DASH}{of[1]:.3f}"


def _unequal(panel: Panel) -> Markup:
    """Warn if points have different samples."""
    found = {(point.row.samples, point.row.seed): None for point in panel.points}
    if len(found) == 1:
        return NOTHING
    sets = ", ".join(f"{samples:,} of seed {seed}" for samples, seed in found)
    words = f"Points have different samples ({sets}), which may explain small differences."
    return tag("p", {"class": "note"}, text(words))


def _table(panel: Panel, files: tuple[str, ...]) -> Markup:
    several = len(files) > 1
    apart = any(point.row.divergence is not None for point in panel.points)
    columns = [
        Column("no."),
        Column("policy", number=False),
        *([Column("file", number=False)] if several else []),
        Column("score"),
        Column("95 %"),
        Column("over full"),
        *([Column("KL"), Column("KL 99.9 %")] if apart else []),
        Column("% of full"),
        Column("bytes"),
        Column("samples"),
        Column("seconds"),
        Column("frontier", number=False),
    ]
    rows = [
        _row(point, files[point.source] if several else None, apart=apart) for point in panel.points
    ]
    return table(f"Every policy: {title(panel)}", columns, rows)


def _row(point: Point, file: str | None, *, apart: bool) -> list[Cell]:
    row = point.row
    far = [number(row.divergence, ".4f"), number(row.divergence_tail, ".4f")]
    return [
        number(point.number, "d"),
        word(row.policy),
        *([] if file is None else [word(file)]),
        number(row.score, ".3f"),
        Cell(interval(row.score_interval), row.score_interval and row.score_interval[0]),
        number(row.score - row.full_score, "+.3f"),
        *(far if apart else []),
        number(100 * point.share, ".1f"),
        number(row.kv_bytes, ",.0f"),
        number(row.samples, ",d"),
        number(row.seconds or None, ",.1f"),
        word("yes" if point.best else "no"),
    ]
