"""The section on quality and time against cache bytes."""

from collections.abc import Sequence

from kv_eval.report.charts import PAGE, compared, seconds, svg
from kv_eval.report.frontier import Panel, Point
from kv_eval.report.markup import NOTHING, Markup, join, tag, text
from kv_eval.report.table import Cell, Column, number, table, word
from kv_eval.report.words import TIMES, score_axis, title

_ABOUT = (
    "Every point is a policy, with its number in the table. Further left, a cache holds "
    "fewer bytes. Filled points, joined by the line, are the frontier: no other policy holds as "
    "few bytes and does as well. A bar is the 95 % interval."
)
_SECONDS = (
    "Seconds are over all samples of a task, prompts included, relative to full in the same file. "
    "They were measured one after the other on a machine that may have had other load, so small "
    "differences mean little."
)


def quality(panels: Sequence[Panel], files: tuple[str, ...]) -> Markup:
    """Draw every panel, with a table below each."""
    timed = any(map(_timed, panels))
    return join(
        tag("p", None, text(_ABOUT)),
        tag("p", None, text(_SECONDS)) if timed else NOTHING,
        *(_panel(panel, files) for panel in panels),
    )


def _panel(panel: Panel, files: tuple[str, ...]) -> Markup:
    called = title(panel)
    drawn = [svg(f"{called}: {score_axis(panel.task)}", compared(panel, files, PAGE))]
    if timed := _timed(panel):
        drawn.append(svg(f"{called}: {TIMES}", seconds(timed, files, PAGE)))
    return tag(
        "article",
        None,
        tag("h3", None, text(called)),
        _equal(panel),
        _unequal(panel),
        tag("div", {"class": "pair"}, *(tag("figure", None, each) for each in drawn)),
        _table(panel, files),
    )


def _timed(panel: Panel) -> tuple[Point, ...]:
    """Return the points with seconds; none if only those of `full` are known."""
    timed = tuple(point for point in panel.points if point.times is not None)
    return timed if any(point.times != 1 for point in timed) else ()


def interval(of: tuple[float, float] | None) -> str:
    """Format a 95 % confidence interval; empty if unknown."""
    return "" if of is None else f"{of[0]:.3f}\N{EN DASH}{of[1]:.3f}"


def _equal(panel: Panel) -> Markup:
    """Say why there is no frontier if policies hold about the same bytes."""
    if not panel.equal:
        return NOTHING
    words = "These policies hold about the same bytes, so each has a row, and no line joins them."
    return tag("p", {"class": "note"}, text(words))


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
        Column("\N{MULTIPLICATION SIGN} full's"),
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
        number(point.times, ".2f"),
        word("yes" if point.best else "no"),
    ]
