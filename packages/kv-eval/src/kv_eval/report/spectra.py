"""Spectra of singular values, head by head."""

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Final

from kv_eval.evaluate.report import Amounts, Spectra
from kv_eval.report.chart import HEIGHT, PLOT, WIDTH, frame
from kv_eval.report.markup import NOTHING, Markup, join, tag, text
from kv_eval.report.read import Source
from kv_eval.report.scale import Axis, axis
from kv_eval.report.table import Column, number, table

FLOOR: Final = 1e-4  # smaller values are drawn here
SHARES: Final = (0.9, 0.99)
_ABOUT = (
    "Singular values over the greatest one of the same head. Every thin line is a head; the thick "
    "one is the median over all. The steeper it falls, the fewer dimensions a cache needs."
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
        None,
        tag("h3", None, text(name)),
        tag("figure", None, _chart(name, layers)),
        table(f"Median over the heads: {name}", columns, rows),
    )


def _chart(name: str, layers: Spectra) -> Markup:
    lines = [
        (layer, i, relative(head))
        for layer, heads in enumerate(layers)
        for i, head in enumerate(heads)
    ]
    longest = max(len(values) for *_, values in lines)
    x = axis("dimension", [0.0, float(longest)])
    decades = tuple(float(power) for power in range(round(math.log10(FLOOR)), 1))
    y = Axis("singular value, power of ten of the greatest", decades)
    middle = [median(values[i] for *_, values in lines if i < len(values)) for i in range(longest)]
    return tag(
        "svg",
        {"class": "chart", "viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}", "role": "img"}
        | {"aria-label": f"singular values of {name}, of {len(lines)} heads"},
        frame(x, y),
        *(_line(values, x, y, "head", f"layer {layer}, head {i}") for layer, i, values in lines),
        _line(middle, x, y, "line", "median over all heads"),
    )


def _line(values: Sequence[float], x: Axis, y: Axis, kind: str, words: str) -> Markup:
    left, top, right, bottom = PLOT
    logs = (math.log10(max(value, FLOOR)) for value in values)
    points = " ".join(
        f"{x.place(float(i), left, right):.1f},{y.place(log, bottom, top):.1f}"
        for i, log in enumerate(logs, 1)
    )
    return tag("polyline", {"class": kind, "points": points}, tag("title", None, text(words)))
