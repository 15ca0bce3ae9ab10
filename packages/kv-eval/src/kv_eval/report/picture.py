"""The frontier as a PNG or SVG file, for documents."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

from kv_eval.extras import MATPLOTLIB
from kv_eval.report.chart import PLOT, spot
from kv_eval.report.frontier import Panel, numbered, panels
from kv_eval.report.labels import spots
from kv_eval.report.quality import axes
from kv_eval.report.read import Source
from kv_eval.report.words import title
from kv_policy.installing import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Form = Literal["png", "svg"]
SHAPES: Final = "osD^vP"
COLOURS: Final = ("#0b6b63", "#b3410e", "#5b3fa6", "#1f5fb4", "#a01f6a", "#6a5b00")


def missing() -> str | None:
    """Return why no picture can be drawn; None if it can."""
    if find_spec("matplotlib") is None:
        command = install_command(MATPLOTLIB)
        return f"--png and --svg need matplotlib: `{command}`, or omit them"
    return None


def picture(sources: Sequence[Source], form: Form) -> bytes:
    """Draw the frontier of every task and setting, with the legend of numbers below.

    The same files give the same bytes.

    Args:
        sources: from `read`.
        form: of the file.

    Raises:
        ImportError: matplotlib is not installed; check `missing` first.
    """
    from matplotlib import rc_context, rcParams
    from matplotlib.figure import Figure

    found, numbers = panels(sources), numbered(sources)
    several = len(sources) > 1
    names = [
        f"{number}  {policy}" + (f"  ({sources[source].name})" if several else "")
        for (source, policy), number in numbers.items()
    ]
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    long = -(-len(names) // columns)
    below = 0.165 * long + 0.2  # inches
    with rc_context():
        rcParams["text.parse_math"] = False  # a name may have a $
        rcParams["svg.hashsalt"] = "kv-serve"  # else the ids differ in every file
        figure = Figure(figsize=(6 * columns, 4 * rows + below), layout="constrained")
        upper, lower = figure.subfigures(2, 1, height_ratios=[4 * rows, below], squeeze=False).flat
        grid = upper.subplots(rows, columns, squeeze=False)
        for place in grid.flat[len(found) :]:
            place.remove()
        for panel, place in zip(found, grid.flat, strict=False):
            _draw(place, panel)
        for column in range(columns):
            words = "\n".join(names[column * long : (column + 1) * long])
            lower.text(0.02 + column / columns, 0.98, words, va="top", fontsize=9)
        made = io.BytesIO()
        # A date would make every file differ; a standalone Figure needs no display.
        figure.savefig(made, format=form, dpi=150, metadata={"Date": None} if form == "svg" else {})
    return made.getvalue()


def _draw(place: "Axes", panel: Panel) -> None:
    x, y = axes(panel)
    line = panel.frontier
    place.plot([100 * p.share for p in line], [p.quality for p in line], color="black", linewidth=1)
    labels = [str(point.number) for point in panel.points]
    middles = [spot(100 * point.share, point.quality, x, y) for point in panel.points]
    for point, label, middle, beside in zip(
        panel.points, labels, middles, spots(middles, labels, PLOT), strict=True
    ):
        colour = COLOURS[point.source % len(COLOURS)]
        place.scatter(
            [100 * point.share],
            [point.quality],
            s=30,
            marker=SHAPES[point.source % len(SHAPES)],
            edgecolors=colour,
            facecolors=colour if point.best else "white",
            zorder=3,
            clip_on=False,  # a point may be on an axis
        )
        place.annotate(
            label,
            (100 * point.share, point.quality),
            (beside[0] - middle[0], middle[1] - beside[1]),  # a unit of a chart is about a point
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8,
        )
    place.set(
        xlabel=x.label,
        ylabel=y.label,
        title=title(panel),
        xlim=(x.ticks[0], x.ticks[-1]),
        ylim=(y.ticks[0], y.ticks[-1]),
        xticks=x.ticks,
        yticks=y.ticks,
    )
    place.grid(alpha=0.3)
