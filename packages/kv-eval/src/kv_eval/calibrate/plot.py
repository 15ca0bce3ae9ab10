"""The frontier as a picture."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from kv_eval.calibrate.grid import Setting
from kv_eval.calibrate.search import Point, frontier
from kv_eval.extras import MATPLOTLIB
from kv_policy.files import write_whole
from kv_policy.installing import install_command


def missing() -> str | None:
    """Say why no picture can be drawn, if so."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return f"drawing needs matplotlib: `{install_command(MATPLOTLIB)}`, or leave --plot out"
    return None


def draw(
    path: Path, points: Sequence[Point[Setting]], chosen: Point[Setting] | None, title: str
) -> None:
    """Draw all settings, bytes against loss, with the frontier as a line; write a PNG file."""
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
    figure.savefig(made, format="png")  # a Figure of its own draws without a display
    write_whole(path, made.getvalue())


def _places(points: Sequence[Point[Setting]]) -> tuple[list[float], list[float]]:
    return [100 * p.ratio for p in points], [100 * p.worst for p in points]
