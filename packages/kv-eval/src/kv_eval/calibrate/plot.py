"""The plot of the frontier."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from kv_eval.calibrate.grid import Setting
from kv_eval.calibrate.search import Point, frontier
from kv_eval.extras import MATPLOTLIB
from kv_policy.files import write_whole
from kv_policy.installing import install_command


def missing() -> str | None:
    """Return why a plot cannot be drawn; None if it can."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return f"plots need matplotlib: `{install_command(MATPLOTLIB)}`, or omit --plot"
    return None


def draw(
    path: Path, points: Sequence[Point[Setting]], chosen: Point[Setting] | None, title: str
) -> None:
    """Plot all settings, bytes against loss, with the frontier as a line, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for pair in dict.fromkeys((p.setting.high, p.setting.low) for p in points):
        mine = [p for p in points if (p.setting.high, p.setting.low) == pair]
        axes.scatter(*_places(mine), s=18, label=" / ".join(pair))
    axes.plot(*_places(frontier(points)), color="black", linewidth=1, label="frontier")
    if chosen is not None:
        axes.scatter(*_places([chosen]), s=120, facecolors="none", edgecolors="black")
    axes.set(
        xlabel="bytes held, % of the full cache",
        ylabel="worst loss over the tasks, % of the full cache's score",
        title=title,
    )
    axes.grid(alpha=0.3)
    axes.legend()
    made = BytesIO()
    figure.savefig(made, format="png")  # a standalone Figure needs no display
    write_whole(path, made.getvalue())


def _places(points: Sequence[Point[Setting]]) -> tuple[list[float], list[float]]:
    return [100 * p.ratio for p in points], [100 * p.worst for p in points]
