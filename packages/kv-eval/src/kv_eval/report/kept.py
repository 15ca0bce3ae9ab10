"""Tokens kept by each head of each layer, as a heat map."""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Final, TypeAlias

from kv_eval.evaluate.report import Layers
from kv_eval.report.markup import NOTHING, Markup, join, tag, text
from kv_eval.report.read import Source
from kv_eval.report.table import Column, number, table

WIDTH: Final = 400.0
_LEFT: Final = 34.0
_TOP: Final = 22.0
_ROW: Final = 14.0
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
        held: for each layer and head data for a script, as `data-held` of its cell; `data-layer`
            and `data-head` are added.
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
        None,
        tag("h3", None, text(name)),
        tag("figure", None, heat(name, layers, form=form, held=held), _summary(layers, form)),
        tag(
            "details",
            None,
            tag("summary", None, text("All numbers")),
            table(title, columns, rows),
        ),
    )


def heat(name: str, layers: Layers, *, form: str = ",.1f", held: Held | None = None) -> Markup:
    """Draw amounts, one cell each; the greatest is opaque.

    Args:
        name: read by screen readers.
        layers: for each layer its heads' amounts, none negative.
        form: format of the amounts, in Python's format syntax.
        held: see `kept_by`.
    """
    most = max(map(max, layers)) or 1.0
    wide = max(len(heads) for heads in layers)
    size = (WIDTH - _LEFT - 2) / wide
    cells = (
        _cell(
            (layer, head),
            (size, amount / most),
            f"{amount:{form}} tokens",
            None if held is None else held[layer][head],
        )
        for layer, heads in enumerate(layers)
        for head, amount in enumerate(heads)
    )
    height = _TOP + _ROW * len(layers) + 2
    return tag(
        "svg",
        {"class": "heat", "viewBox": f"0 0 {WIDTH:g} {height:g}", "role": "img"}
        | {"aria-label": f"tokens per layer and head of {name}"},
        *(
            _words(_LEFT + (head + 0.5) * size, 15.0, str(head), "middle")
            for head in _some(wide, 16)
        ),
        _words(2.0, 15.0, "head", "start"),
        *(
            _words(_LEFT - 5, _TOP + (layer + 0.5) * _ROW + 4, str(layer), "end")
            for layer in _some(len(layers), 40)
        ),
        *cells,
    )


def _cell(at: tuple[int, int], looks: tuple[float, float], amount: str, held: str | None) -> Markup:
    """Draw a cell with a width and opacity at a layer and head."""
    (layer, head), (size, part) = at, looks
    return tag(
        "rect",
        {
            "class": "cell",
            "x": _LEFT + head * size,
            "y": _TOP + layer * _ROW,
            "width": size,
            "height": _ROW,
            "fill-opacity": part,
            "data-name": f"layer {layer}, head {head}",
            "data-facts": amount,
            "data-held": held,
            "data-layer": None if held is None else layer,
            "data-head": None if held is None else head,
        },
        tag("title", None, text(f"layer {layer}, head {head}: {amount}")),
    )


def _summary(layers: Layers, form: str) -> Markup:
    amounts = list(chain.from_iterable(layers))
    least, most = (format(amount, form) for amount in (min(amounts), max(amounts)))
    words = f"Least {least}, mean {fmean(amounts):,.1f}, most {most} tokens."
    return tag("figcaption", None, text(words))


def _some(count: int, most: int) -> range:
    """Return at most `most` of 0 to `count` - 1, at equal distances."""
    return range(0, count, -(-count // most))


def _words(x: float, y: float, words: str, anchor: str) -> Markup:
    return tag("text", {"x": x, "y": y, "text-anchor": anchor}, text(words))
