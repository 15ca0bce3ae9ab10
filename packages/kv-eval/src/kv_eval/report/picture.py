"""Quality against bytes as a PNG or SVG file, for documents."""

from collections.abc import Sequence
from typing import Final, Literal

import altair as alt
from vl_convert import vegalite_to_png, vegalite_to_svg

from kv_eval.report.charts import PRINT, compared, data, spec
from kv_eval.report.frontier import numbered, panels
from kv_eval.report.read import Source
from kv_eval.report.words import score_axis, title

Form = Literal["png", "svg"]
SCALE: Final = 2.0  # pixels of a PNG file per unit of the picture


def picture(sources: Sequence[Source], form: Form) -> bytes:
    """Draw every task and setting, with the legend of numbers below.

    The same files give the same bytes.

    Args:
        sources: from `read`.
        form: of the file.
    """
    found, files = panels(sources), tuple(source.name for source in sources)
    drawn = [
        compared(panel, files, PRINT).properties(
            title=alt.Title(title(panel), subtitle=score_axis(panel.task))
        )
        for panel in found
    ]
    names = [
        {"row": f"{number}  {policy}" + (f" ({files[source]})" if len(files) > 1 else "")}
        for (source, policy), number in numbered(sources).items()
    ]
    listed = (
        alt.Chart(data(names), height=alt.Step(16))
        .mark_text(align="left", fontSize=12, limit=800, color=PRINT.ink)
        .encode(x=alt.value(0), y=alt.Y("row:N", sort=None, axis=None), text="row:N")
    )
    whole = spec(alt.vconcat(alt.concat(*drawn, columns=2), listed), PRINT)
    return vegalite_to_svg(whole).encode() if form == "svg" else vegalite_to_png(whole, scale=SCALE)
