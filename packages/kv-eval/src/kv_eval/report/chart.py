"""Scatter charts as SVG without scripts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_eval.report.labels import Box, Spot, spots
from kv_eval.report.markup import NOTHING, Markup, join, tag, text
from kv_eval.report.scale import Axis

WIDTH: Final = 400.0  # units of the picture; a page scales it to its width
HEIGHT: Final = 300.0
PLOT: Final[Box] = (50.0, 30.0, 388.0, 256.0)
SHAPES: Final = (  # one per file; "" is a circle
    "",
    "M-4.2,-4.2H4.2V4.2H-4.2Z",
    "M0,-6L6,0L0,6L-6,0Z",
    "M0,-5.6L5.4,4.2H-5.4Z",
    "M0,5.6L5.4,-4.2H-5.4Z",
    "M-2,-5.5H2V-2H5.5V2H2V5.5H-2V2H-5.5V-2H-2Z",
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point.

    Attributes:
        x: value on the horizontal axis.
        y: value on the vertical axis.
        kind: index of its file; determines shape and colour.
        filled: whether it is highlighted.
        label: short text beside it.
        name: title of its tooltip.
        facts: lines of its tooltip.
    """

    x: float
    y: float
    kind: int
    filled: bool
    label: str
    name: str
    facts: tuple[str, ...]


def chart(
    title: str,
    marks: Sequence[Mark],
    x: Axis,
    y: Axis,
    *,
    line: Sequence[tuple[float, float]] = (),
    rule: float | None = None,
) -> Markup:
    """Draw points.

    Args:
        title: read by screen readers.
        marks: the points; the first is drawn at the bottom.
        x: the horizontal axis.
        y: the vertical axis.
        line: values joined by a line.
        rule: a value on the vertical axis marked by a horizontal line.
    """
    places = [spot(mark.x, mark.y, x, y) for mark in marks]
    found = spots(places, [mark.label for mark in marks], PLOT)
    return tag(
        "svg",
        {"class": "chart", "viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}", "role": "group"}
        | {"aria-label": title},
        frame(x, y),
        _rule(rule, x, y),
        _line([spot(*values, x, y) for values in line]),
        *(_label(mark.label, at) for mark, at in zip(marks, found, strict=True)),
        *(_mark(mark, place) for mark, place in zip(marks, places, strict=True)),
    )


def frame(x: Axis, y: Axis) -> Markup:
    """Draw two axes with their ticks and labels."""
    left, top, right, bottom = PLOT
    pieces = []
    for tick in x.ticks:
        at = x.place(tick, left, right)
        pieces += [_grid(at, top, at, bottom), _words("middle", at, bottom + 15, x.number(tick))]
    for tick in y.ticks:
        at = y.place(tick, bottom, top)
        pieces += [_grid(left, at, right, at), _words("end", left - 6, at + 4, y.number(tick))]
    return tag(
        "g",
        {"class": "frame"},
        *pieces,
        _words("middle", (left + right) / 2, HEIGHT - 8, x.label),
        _words("start", 4.0, 14.0, y.label),
    )


def shape(kind: int) -> Markup:
    """Draw the shape of a file's points around the origin."""
    path = SHAPES[kind % len(SHAPES)]
    if not path:
        return tag("circle", {"class": "dot", "r": 4.6})
    return tag("path", {"class": "dot", "d": path})


def colour(kind: int) -> str:
    """Return the CSS class that colours a file's points."""
    return f"k{kind % len(SHAPES)}"


def _mark(mark: Mark, place: Spot) -> Markup:
    words = f"{mark.name}: {', '.join(mark.facts)}"
    return tag(
        "g",
        {
            "class": f"mark {colour(mark.kind)} {'on' if mark.filled else 'off'}",
            "transform": f"translate({place[0]:.2f},{place[1]:.2f})",
            "tabindex": "0",
            "role": "img",
            "aria-label": words,
            "data-name": mark.name,
            "data-facts": "\n".join(mark.facts),
        },
        tag("title", None, text(words)),
        tag("circle", {"class": "reach", "r": 11}),
        shape(mark.kind),
    )


def _label(label: str, at: Spot) -> Markup:
    where = {"x": f"{at[0]:.2f}", "y": f"{at[1] + 3.5:.2f}", "text-anchor": "middle"}
    return tag("text", {"class": "label", "aria-hidden": "true", **where}, text(label))


def _line(places: Sequence[Spot]) -> Markup:
    if len(places) < 2:
        return NOTHING
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
    return tag("polyline", {"class": "line", "points": points})


def _rule(value: float | None, x: Axis, y: Axis) -> Markup:
    if value is None:
        return NOTHING
    left, at = spot(x.ticks[0], value, x, y)
    return tag("line", {"class": "rule", "x1": left, "y1": at, "x2": PLOT[2], "y2": at})


def _grid(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return tag("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2})


def _words(anchor: str, x: float, y: float, words: str) -> Markup:
    return tag("text", {"x": x, "y": y, "text-anchor": anchor}, text(words))


def spot(right: float, up: float, x: Axis, y: Axis) -> Spot:
    """Return the position of a point's values in the picture."""
    return x.place(right, PLOT[0], PLOT[2]), y.place(up, PLOT[3], PLOT[1])


def key(kinds: Sequence[str]) -> Markup:
    """Return the legend of files; nothing for a single file."""
    if len(kinds) < 2:
        return NOTHING
    box = {"class": "swatch", "viewBox": "-8 -8 16 16", "aria-hidden": "true"}
    return tag(
        "ul",
        {"class": "key"},
        *(
            tag(
                "li",
                {"class": f"{colour(kind)} on"},
                join(tag("svg", box, shape(kind)), tag("span", None, text(name))),
            )
            for kind, name in enumerate(kinds)
        ),
    )
