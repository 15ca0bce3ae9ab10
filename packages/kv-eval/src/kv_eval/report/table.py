"""Tables with columns that a script can sort."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_eval.report.markup import Markup, join, tag, text

MINUS: Final = "\N{MINUS SIGN}"  # as wide as a plus


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, and whether it holds numbers."""

    name: str
    number: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """Text and sort key of a cell; None sorts last in both directions."""

    shown: str
    value: str | float | int | None


def word(shown: str) -> Cell:
    """Return a cell of text."""
    return Cell(shown, shown)


def number(value: float | int | None, form: str) -> Cell:
    """Return a cell of a number in a Python format; a dash for None."""
    return Cell("\N{EN DASH}", None) if value is None else Cell(minus(format(value, form)), value)


def minus(shown: str) -> str:
    """Replace hyphens by minus signs, which are as wide as a plus."""
    return shown.replace("-", MINUS)


def table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> Markup:
    """Return a table in its own box, which scrolls if the page is narrower.

    Headings have `data-sort`, number or text, and cells `data-value`, the sort key.

    Args:
        title: read by screen readers, before the table and for the box.
        columns: the headings.
        rows: cells in the order of the columns.
    """
    body = (
        tag("tr", None, *(_cell(c, cell) for c, cell in zip(columns, row, strict=True)))
        for row in rows
    )
    return tag(
        "div",
        {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": title},
        tag(
            "table",
            None,
            tag("caption", None, text(title)),
            tag("thead", None, tag("tr", None, *map(_head, columns))),
            tag("tbody", None, join(*body)),
        ),
    )


def _head(column: Column) -> Markup:
    kind = {"data-sort": "number" if column.number else "text"}
    return tag("th", {"scope": "col", "class": _class(column), **kind}, text(column.name))


def _cell(column: Column, cell: Cell) -> Markup:
    value = "" if cell.value is None else cell.value
    shown = value if isinstance(value, str) else repr(value)  # sort by all digits
    return tag("td", {"class": _class(column), "data-value": shown}, text(cell.shown))


def _class(column: Column) -> str:
    return "number" if column.number else "words"
