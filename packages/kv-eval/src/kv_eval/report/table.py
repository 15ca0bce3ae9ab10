"""Tables whose columns a script can sort by."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_eval.report.markup import Markup, join, tag, text
from kv_eval.report.scale import MINUS


@dataclass(frozen=True, slots=True)
class Column:
    """A column's head, and whether numbers stand in it."""

    name: str
    number: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows, and what it is sorted by; None comes last in both directions."""

    shown: str
    value: str | float | int | None


def word(shown: str) -> Cell:
    """Make a cell of text."""
    return Cell(shown, shown)


def number(value: float | int | None, form: str) -> Cell:
    """Make a cell of a number in a format of Python's; a dash where there is none."""
    return Cell("\N{EN DASH}", None) if value is None else Cell(minus(format(value, form)), value)


def minus(shown: str) -> str:
    """Write the sign that is as wide as a plus."""
    return shown.replace("-", MINUS)


def table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> Markup:
    """Write a table in a box of its own, which scrolls where the page is narrower.

    Heads carry `data-sort`, number or text, and cells `data-value`, what they are sorted by.

    Args:
        title: read out before the table, and of the box.
        columns: the heads.
        rows: as many cells each.
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
    shown = value if isinstance(value, str) else repr(value)  # sorted by all its digits
    return tag("td", {"class": _class(column), "data-value": shown}, text(cell.shown))


def _class(column: Column) -> str:
    return "number" if column.number else "words"
