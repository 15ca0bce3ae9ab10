"""Tokens kept by each head of each layer, as a heat map."""

from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import fmean
from typing import Final, Literal, TypeAlias

import altair as alt

from kv_eval.evaluate.report import Layers
from kv_eval.report.charts import PAGE, WIDTH, data, svg
from kv_eval.report.markup import NOTHING, Markup, join, tag, text
from kv_eval.report.read import Source
from kv_eval.report.table import Column, number, table

_ROW: Final = 14  # height of a layer's row
_ABOUT = (
    "Tokens in the cache after the prompt, mean over the samples: a row for each layer, a column "
    "for each of its KV heads. The stronger the colour, the more; the strongest is the most that "
    "one head of that policy keeps."
)
Held: TypeAlias = Sequence[Sequence[str]]  # for each layer and head, the places of its tokens


def kept(sources: Sequence[Source]) -> Markup:
    """Draw a map for each policy of each file with counts; nothing if there is none."""
    several = len(sources) > 1
    found = [
        (f"{policy} ({source.name})" if several else policy, layers)
        for source in sources
        for policy, layers in source.report.kept.items()
    ]
    if not found:
        return NOTHING
    return join(tag("p", None, text(_ABOUT)), *(kept_by(name, layers) for name, layers in found))


def kept_by(name: str, layers: Layers, *, form: str = ",.1f", held: Held | None = None) -> Markup:
    """Draw the map of one policy, with a table of its numbers.

    Args:
        name: of the policy.
        layers: for each layer its heads' tokens.
        form: format of the numbers, in Python's format syntax.
        held: for each layer and head data for a script, as `data-held` of an item of a hidden list
            in the order of the cells; `data-layer` and `data-head` are added.
    """
    most = max(len(heads) for heads in layers)
    columns = [Column("layer"), *(Column(f"head {head}") for head in range(most))]
    rows = [
        [
            number(layer, "d"),
            *(number(heads[i] if i < len(heads) else None, form) for i in range(most)),
        ]
        for layer, heads in enumerate(layers)
    ]
    title = f"Tokens per layer and head: {name}"
    return tag(
        "article",
        {"class": "beside"},
        tag("h3", None, text(name)),
        tag("figure", None, svg(title, heat(layers, form)), _summary(layers, form)),
        NOTHING if held is None else tag("ol", {"hidden": ""}, *_items(held)),
        tag(
            "details",
            None,
            tag("summary", None, text("All numbers")),
            table(title, columns, rows),
        ),
    )


def heat(layers: Layers, form: str) -> alt.Chart:
    """Draw amounts, none negative, one cell each in their order; the greatest is opaque."""
    most = max(map(max, layers)) or 1.0
    cells = [
        {
            **{"layer": layer, "head": head, "part": amount / most},
            "told": f"layer {layer}, head {head}\n{amount:{form}} tokens",
        }
        for layer, heads in enumerate(layers)
        for head, amount in enumerate(heads)
    ]
    found: alt.Chart = (
        alt.Chart(data(cells), width=WIDTH, height=alt.Step(_ROW))
        .mark_rect(color=PAGE.accent, stroke=PAGE.rule, strokeWidth=0.5)
        .encode(
            x=alt.X("head:O", axis=_axis(orient="top")),
            y=alt.Y("layer:O", axis=_axis()),
            fillOpacity=alt.FillOpacity(
                "part:Q", scale=alt.Scale(domain=[0, 1], range=[0, 1]), legend=None
            ),
            description="told:N",
        )
    )
    return found


def _axis(orient: Literal["top", "left"] = "left") -> alt.Axis:
    return alt.Axis(orient=orient, labelAngle=0, labelOverlap=True, grid=False)


def _items(held: Held) -> Iterator[Markup]:
    for layer, heads in enumerate(held):
        for head, places in enumerate(heads):
            yield tag("li", {"data-layer": layer, "data-head": head, "data-held": places})


def _summary(layers: Layers, form: str) -> Markup:
    amounts = list(chain.from_iterable(layers))
    least, most = (format(amount, form) for amount in (min(amounts), max(amounts)))
    words = f"Least {least}, mean {fmean(amounts):,.1f}, most {most} tokens."
    return tag("figcaption", None, text(words))
