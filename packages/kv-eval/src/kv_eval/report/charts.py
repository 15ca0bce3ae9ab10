"""Charts of measurements by Altair, which Vega-Lite draws as SVG without scripts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import altair as alt
from vl_convert import vegalite_to_svg

from kv_eval.report.frontier import Panel, Point
from kv_eval.report.markup import Markup, tag
from kv_eval.report.words import HELD, TIMES, name, score_axis, told

Chart: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart
WIDTH: Final = 400  # units of the picture with its labels; a page scales it to its width
HEIGHT: Final = 300
STEP: Final = 36  # height of a policy's row
SHAPES: Final = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
NEAR: Final = (0.09, 0.055)  # of an axis: a number with its gap
_SVG: Final = re.compile(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>(.*)</svg>\s*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Look:
    """Colours of a chart, as CSS values.

    Attributes:
        ground: behind the chart.
        paper: fill of a hollow point.
        ink: lines and numbers.
        soft: other text.
        rule: lines of the grid.
        accent: the colour of a chart of one quantity.
        kinds: one per file.
    """

    ground: str
    paper: str
    ink: str
    soft: str
    rule: str
    accent: str
    kinds: tuple[str, ...]


PAGE: Final = Look(  # variables of the page's style, which follow the browser's light or dark mode
    ground="transparent",
    paper="var(--paper)",
    ink="var(--ink)",
    soft="var(--soft)",
    rule="var(--rule)",
    accent="var(--accent)",
    kinds=tuple(f"var(--k{i})" for i in range(len(SHAPES))),
)
PRINT: Final = Look(
    ground="#ffffff",
    paper="#ffffff",
    ink="#1b1f24",
    soft="#56606b",
    rule="#d5dae0",
    accent="#0b6b63",
    kinds=("#0b6b63", "#b3410e", "#5b3fa6", "#1f5fb4", "#a01f6a", "#6a5b00"),
)


def svg(title: str, chart: Chart) -> Markup:
    """Draw a chart for a page, in the page's colours.

    Marks have their description as `aria-label`: the name, and facts in lines of their own.

    Args:
        title: read by screen readers.
        chart: a chart with a width.
    """
    sized = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    found = _SVG.fullmatch(vegalite_to_svg(spec(sized, PAGE)))
    assert found, "Vega draws one SVG element"
    root = {"class": "chart", "viewBox": found[1], "role": "group", "aria-label": title}
    return tag("svg", root, Markup(found[2]))


def spec(chart: alt.TopLevelMixin, look: Look) -> dict[str, object]:
    """Return a chart for Vega-Lite, with the colours and sizes of its axes, title and legend."""
    styled = chart.configure(
        background=look.ground,
        padding=2,
        axis=alt.AxisConfig(
            domain=False,
            ticks=False,
            gridColor=look.rule,
            labelColor=look.soft,
            labelFlush=False,
            labelFontSize=12,
            labelPadding=5,
            titleColor=look.soft,
            titleFontSize=12,
            titleFontWeight="normal",
            titlePadding=8,
        ),
        legend=alt.LegendConfig(
            orient="bottom", columns=1, labelColor=look.soft, labelFontSize=12, labelLimit=360
        ),
        title=alt.TitleConfig(
            anchor="start",
            frame="group",
            offset=20,
            color=look.ink,
            subtitleColor=look.soft,
            fontSize=12,
            subtitleFontSize=12,
        ),
        view=alt.ViewConfig(stroke=None),
    )
    # Its parts were checked when they were made.
    found: dict[str, object] = styled.to_dict(validate=False)
    return found


def compared(panel: Panel, files: tuple[str, ...], look: Look) -> Chart:
    """Draw quality with its intervals: against bytes, or by policy where bytes are equal."""
    return by_policy(panel, files, look) if panel.equal else frontier(panel, files, look)


def frontier(panel: Panel, files: tuple[str, ...], look: Look) -> Chart:
    """Draw quality against bytes, with the frontier as a line and the numbers of the table."""
    spans = (_ends([0.0, *(100 * p.share for p in panel.points)]), _qualities(panel))
    base = alt.Chart(_data(panel.points, files, look), width=WIDTH, height=HEIGHT).encode(
        x=alt.X("share:Q", title=HELD, scale=alt.Scale(domain=spans[0]), axis=_some(away=12)),
        y=alt.Y("quality:Q", title=None, scale=alt.Scale(domain=spans[1]), axis=_some()),
    )
    best = base.transform_filter("datum.best")
    away = -1 if panel.lower else 1  # no point is better and has fewer bytes than one of the line
    numbers = [
        alt.Chart(data(_numbers(panel, spans, best=on)))
        .mark_text(
            align="right" if on else "left",
            dx=5 * side,
            dy=8 * side * away,
            color=look.ink,
            fontSize=11,
            aria=False,
        )
        .encode(x="share:Q", y="quality:Q", text="number:N")
        for on, side in ((True, -1), (False, 1))
    ]
    return alt.layer(
        best.mark_line(color=look.ink, strokeWidth=1.5, aria=False),
        _interval(base, look).encode(y="low:Q", y2="high:Q"),
        _points(base, files, look),
        *numbers,
    ).properties(title=_title(score_axis(panel.task), look))


def by_policy(panel: Panel, files: tuple[str, ...], look: Look) -> Chart:
    """Draw the quality of each policy in a row of its own."""
    base = _rows(panel.points, files, look).encode(
        x=alt.X("quality:Q", title=None, scale=alt.Scale(domain=_qualities(panel)), axis=_some())
    )
    bar = _interval(base, look).encode(x="low:Q", x2="high:Q")
    drawn = alt.layer(bar, _points(base, files, look), _names(base, look))
    return drawn.properties(title=_title(score_axis(panel.task), look))


def seconds(points: Sequence[Point], files: tuple[str, ...], look: Look) -> Chart:
    """Draw the seconds of each policy over those of `full`, in a row of its own."""
    most = max(1.0, *(point.times or 0.0 for point in points))
    base = _rows(points, files, look).encode(
        x=alt.X("times:Q", title=None, scale=alt.Scale(domain=[0, most]), axis=_some())
    )
    bar = base.mark_rule(color=look.soft, aria=False).encode(x2=alt.X2Datum(0))
    drawn = alt.layer(bar, _points(base, files, look), _names(base, look))
    return drawn.properties(title=_title(TIMES, look))


def data(values: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return records as the data of a chart."""
    return {"values": [*values]}


def _data(points: Sequence[Point], files: tuple[str, ...], look: Look) -> dict[str, object]:
    return data([_values(point, files, look) for point in points])


def _values(point: Point, files: tuple[str, ...], look: Look) -> dict[str, object]:
    low, high = point.interval or (None, None)
    kind = look.kinds[point.source % len(look.kinds)]
    return {
        **{"share": 100 * point.share, "quality": point.quality, "low": low, "high": high},
        **{"times": point.times, "best": point.best, "file": files[point.source]},
        "fill": kind if point.best else look.paper,
        "row": _row(point, files),
        "told": told(point, files),
    }


def _row(point: Point, files: tuple[str, ...]) -> str:
    return f"{point.number}  {name(point, files)}"


def _rows(points: Sequence[Point], files: tuple[str, ...], look: Look) -> alt.Chart:
    order = [_row(point, files) for point in points]
    y = alt.Y("row:N", sort=order, axis=None, scale=alt.Scale(paddingInner=0, paddingOuter=0))
    rows = alt.Chart(_data(points, files, look), width=WIDTH, height=alt.Step(STEP))
    found: alt.Chart = rows.encode(y=y)
    return found


def _names(base: alt.Chart, look: Look) -> alt.Chart:
    """Write the policy above its row."""
    names = base.mark_text(
        align="left", dx=2, dy=-12, limit=330, color=look.ink, fontSize=12, aria=False
    )
    found: alt.Chart = names.encode(x=alt.value(0), text="row:N")
    return found


def _points(base: alt.Chart, files: tuple[str, ...], look: Look) -> alt.Chart:
    legend = alt.Legend(title=None, symbolFillColor=look.paper) if len(files) > 1 else None
    found: alt.Chart = base.mark_point(size=70, strokeWidth=1.6, opacity=1).encode(
        stroke=alt.Stroke(
            "file:N", scale=alt.Scale(domain=[*files], range=[*look.kinds]), legend=legend
        ),
        shape=alt.Shape("file:N", scale=alt.Scale(domain=[*files], range=[*SHAPES]), legend=legend),
        fill=alt.Fill("fill:N", scale=None),
        description="told:N",
    )
    return found


def _interval(base: alt.Chart, look: Look) -> alt.Chart:
    known = base.transform_filter("isValid(datum.low)")
    found: alt.Chart = known.mark_rule(color=look.soft, strokeWidth=1.5, aria=False)
    return found


def _numbers(
    panel: Panel, spans: tuple[list[float], list[float]], *, best: bool
) -> list[dict[str, object]]:
    """Return the numbers of points on or off the frontier; one text for points that are near."""
    (left, right), (low, high) = spans
    found: list[tuple[Point, list[int]]] = []
    for point in sorted(panel.points, key=lambda p: (p.share, p.quality)):
        if point.best != best:
            continue
        for first, numbers in found:
            x = abs(point.share - first.share) * 100 / (right - left)
            y = abs(point.quality - first.quality) / (high - low)
            if x < NEAR[0] and y < NEAR[1]:
                numbers.append(point.number)
                break
        else:
            found.append((point, [point.number]))
    return [
        {
            **{"share": 100 * point.share, "quality": point.quality},
            "number": ", ".join(map(str, sorted(numbers))),
        }
        for point, numbers in found
    ]


def _qualities(panel: Panel) -> list[float]:
    """Return the ends of the axis: shares from 0 to 1, losses from 0, and all intervals."""
    ends = (0.0,) if panel.lower else (0.0, 1.0)
    known = (value for point in panel.points for value in point.interval or ())
    return _ends([*ends, *(point.quality for point in panel.points), *known])


def _ends(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [low, high if high > low else low + 1e-3]


def _title(label: str, look: Look) -> alt.Title:
    """Return the label of a vertical axis, above it: it may be longer than the axis."""
    return alt.Title(label, color=look.soft, fontWeight="normal")


def _some(*, away: int = 5) -> alt.Axis:
    """Return an axis of some ticks, whose labels are away from the lowest numbers of points."""
    return alt.Axis(tickCount=5, labelPadding=away)
