"""Spectra of singular values, head by head."""

from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Final

import altair as alt

from kv_eval.evaluate.report import Amounts, Spectra
from kv_eval.report.charts import HEIGHT, PAGE, WIDTH, Chart, data, svg
from kv_eval.report.markup import NOTHING, Markup, join, tag, text
from kv_eval.report.read import Source
from kv_eval.report.table import Column, number, table

FLOOR: Final = 1e-4  # smaller values are drawn here
SHARES: Final = (0.9, 0.99)
_ABOUT = (
    "Singular values over the greatest one of the same head. A thin line is the median over the "
    "heads of a layer; the thick one is that over all heads. The steeper it falls, the fewer "
    "dimensions a cache needs."
)


def spectra(sources: Sequence[Source]) -> Markup:
    """Draw the spectra of each file that has some; nothing if there are none."""
    several = len(sources) > 1
    found = [
        (f"{name} ({source.name})" if several else name, layers)
        for source in sources
        for name, layers in source.report.spectra.items()
    ]
    if not found:
        return NOTHING
    return join(tag("p", None, text(_ABOUT)), *(_one(name, layers) for name, layers in found))


def relative(values: Amounts) -> tuple[float, ...]:
    """Divide by the greatest; all 0 where that is 0."""
    most = max(values)
    return tuple(value / most if most else 0.0 for value in values)


def dimensions(values: Amounts, share: float) -> int:
    """Count the greatest values whose squares sum to at least a share of the total.

    Args:
        values: in descending order.
        share: above 0, at most 1.
    """
    sums = list(accumulate(value**2 for value in relative(values)))
    return next((i for i, total in enumerate(sums, 1) if total >= share * sums[-1]), len(sums))


def _one(name: str, layers: Spectra) -> Markup:
    columns = [Column("layer"), Column("heads")]
    columns += [Column(f"dimensions for {share:.0%} of the squares") for share in SHARES]
    rows = [
        [
            number(layer, "d"),
            number(len(heads), "d"),
            *(number(median(dimensions(head, share) for head in heads), "g") for share in SHARES),
        ]
        for layer, heads in enumerate(layers)
    ]
    return tag(
        "article",
        {"class": "beside"},
        tag("h3", None, text(name)),
        tag("figure", None, svg(f"Singular values: {name}", lines(layers))),
        table(f"Median over the heads: {name}", columns, rows),
    )


def lines(layers: Spectra) -> Chart:
    """Draw a line for each layer, and the median of all heads."""
    values = [
        {"layer": layer, "told": f"layer {layer}\nmedian over its heads", **point}
        for layer, heads in enumerate(layers)
        for point in _median(heads)
    ]
    base = alt.Chart(data(values), width=WIDTH, height=HEIGHT).encode(
        x=alt.X("dimension:Q", title="dimension", axis=alt.Axis(tickCount=5)),
        y=alt.Y(
            "value:Q",
            title=None,
            scale=alt.Scale(type="log", domain=[FLOOR, 1]),
            axis=alt.Axis(values=[10.0**-i for i in range(5)], format="~r"),
        ),
    )
    every = data(_median([head for heads in layers for head in heads]))
    thin = base.mark_line(color=PAGE.accent, strokeWidth=0.8, strokeOpacity=0.6)
    thick = base.properties(data=every).mark_line(color=PAGE.ink, strokeWidth=2, aria=False)
    return alt.layer(thin.encode(detail="layer:N", description="told:N"), thick).properties(
        title=alt.Title("singular value, over the greatest", color=PAGE.soft, fontWeight="normal")
    )


def _median(heads: Sequence[Amounts]) -> list[dict[str, float]]:
    """Return the median of relative values, dimension by dimension; no less than the floor."""
    found = [relative(head) for head in heads]
    return [
        {"dimension": i + 1.0, "value": max(FLOOR, median(v[i] for v in found if i < len(v)))}
        for i in range(max(map(len, found)))
    ]
