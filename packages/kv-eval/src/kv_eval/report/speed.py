"""The section on time against cache bytes."""

from collections.abc import Sequence

from kv_eval.report.chart import Mark, chart, key
from kv_eval.report.frontier import Panel
from kv_eval.report.markup import NOTHING, Markup, join, tag, text
from kv_eval.report.scale import axis
from kv_eval.report.table import Column, number, table, word
from kv_eval.report.words import HELD, TIMES, facts, name, title

_ABOUT = (
    "Seconds are over all samples of a task, prompts included, relative to full in the same file. "
    "They were measured one after the other on a machine that may have had other load, so small "
    "differences mean little. The line marks full; points that are filled above are filled here."
)


def speed(panels: Sequence[Panel], files: tuple[str, ...]) -> Markup:
    """Draw the seconds of every panel with more than `full`; nothing if there are none."""
    shown = tuple(map(_panel, panels, [files] * len(panels)))
    if not any(shown):
        return NOTHING
    return join(tag("p", None, text(_ABOUT)), key(files), *shown)


def _panel(panel: Panel, files: tuple[str, ...]) -> Markup:
    timed = [(point, point.times) for point in panel.points if point.times is not None]
    if all(times == 1 for _, times in timed):
        return NOTHING
    marks = [
        Mark(
            x=100 * point.share,
            y=times,
            kind=point.source,
            filled=point.best,
            label=str(point.number),
            name=name(point, files),
            facts=facts(point, loss=panel.lower),
        )
        for point, times in timed
    ]
    x = axis(HELD, [0.0, *(mark.x for mark in marks)])
    y = axis(TIMES, [0.0, 1.0, *(mark.y for mark in marks)])
    rows = [
        [
            number(point.number, "d"),
            word(name(point, files)),
            number(100 * point.share, ".1f"),
            number(point.row.seconds, ",.1f"),
            number(times, ".2f"),
        ]
        for point, times in timed
    ]
    columns = [Column("no."), Column("policy", number=False)]
    columns += [Column("% of full"), Column("seconds"), Column("over full's")]
    called = title(panel)
    return tag(
        "article",
        None,
        tag("h3", None, text(called)),
        tag("figure", None, chart(f"{called}: seconds against bytes", marks, x, y, rule=1.0)),
        table(f"Seconds: {called}", columns, rows),
    )
