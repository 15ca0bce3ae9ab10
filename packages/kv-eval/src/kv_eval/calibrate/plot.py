"""The plot of the frontier."""

from collections.abc import Sequence
from pathlib import Path

from kv_eval.calibrate.grid import Setting
from kv_eval.calibrate.search import Point, frontier
from kv_policy.files import write_whole


def draw(
    path: Path, points: Sequence[Point[Setting]], chosen: Point[Setting] | None, title: str
) -> None:
    """Plot all settings, bytes against loss, with the frontier as a line, as PNG."""
    import altair as alt
    from vl_convert import vegalite_to_png

    from kv_eval.report.charts import PRINT, spec
    from kv_eval.report.picture import SCALE

    base = alt.Chart(_data(points), width=560, height=320).encode(
        x=alt.X("held:Q", title="bytes held, % of the full cache"),
        y=alt.Y("loss:Q", title="worst loss over the tasks, % of the full cache's score"),
    )
    line = base.properties(data=_data(frontier(points))).mark_line(color=PRINT.ink, strokeWidth=1)
    every = base.mark_point(filled=True, size=40, opacity=1).encode(
        color=alt.Color("pair:N", title="formats", scale=alt.Scale(range=[*PRINT.kinds]), sort=None)
    )
    ring = base.properties(data=_data([] if chosen is None else [chosen]))
    whole = alt.layer(line, every, ring.mark_point(size=220, color=PRINT.ink)).properties(
        title=title
    )
    write_whole(path, vegalite_to_png(spec(whole, PRINT), scale=SCALE))


def _data(points: Sequence[Point[Setting]]) -> dict[str, object]:
    values = [
        {
            **{"held": 100 * point.ratio, "loss": 100 * point.worst},
            "pair": f"{point.setting.high} / {point.setting.low}",
        }
        for point in points
    ]
    return {"values": values}
