"""Markdown tables: writing them, and finding and replacing them in a page."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

TABLE: Final = re.compile(r"^\|.*\|$(?:\n\|.*\|$)*", re.MULTILINE)
# A figure's name in the result is in a comment behind its description: readers need words.
FIGURE: Final = re.compile(r"^\| (.+) <!-- (\w+) --> \| [^|]+ \|$", re.MULTILINE)

Row = Mapping[str, Any]
Said = Mapping[str, str]
# From a result and the page's descriptions of its figures to the tables in page order.
Writer = Callable[[Row, Said], Iterator[str]]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    rows = (head, ("---",) * len(head), *lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---")


def figures(result: Row, said: Said) -> str:
    """Write the figures that a document may quote, with the page's descriptions and in its order.

    Raises:
        ValueError: the page lacks the description of a figure.
    """
    summary: Mapping[str, float] = result["summary"]
    if missing := ", ".join(name for name in summary if name not in said):
        raise ValueError(f"describe {missing} of {result['name']} in a row of the page's table")
    found = [(name, what) for name, what in said.items() if name in summary]
    lines = ((f"{what} <!-- {name} -->", number(summary[name])) for name, what in found)
    return table(("figure", "value"), lines)


def number(value: float) -> str:
    """Write a figure with four decimals; a whole number has none."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4f}"


def only_figures(result: Row, said: Said) -> Iterator[str]:
    """Write the figures of a result that needs no other table."""
    yield figures(result, said)


def by_policy(result: Row, said: Said, cells: Mapping[str, str]) -> Iterator[str]:
    """Write the figures, and a table with a line for each policy.

    Args:
        result: its rows have a `policy`.
        said: the page's descriptions of the figures.
        cells: formats of what is written of a row, by the head of the column.
    """
    yield figures(result, said)
    yield policies(result["rows"], cells)


def policies(rows: Iterable[Row], cells: Mapping[str, str]) -> str:
    """Write a table with a line for each row, which has a `policy`; `cells` as in `by_policy`."""
    lines = (
        (f"`{row['policy']}`", *(cell.format_map(row) for cell in cells.values())) for row in rows
    )
    return table(("policy", *cells), lines)


def shown(page: str) -> list[str]:
    """Return the tables of a page."""
    return TABLE.findall(page)


def said(page: str) -> dict[str, str]:
    """Return the descriptions of the figures in the first table of a page, by their names."""
    return {name: what for what, name in FIGURE.findall(shown(page)[0])}


def renewed(page: str, name: str, tables: Sequence[str]) -> str:
    """Replace the tables of a page.

    Raises:
        ValueError: the page has more tables, or fewer.
    """
    if (there := len(shown(page))) != len(tables):
        raise ValueError(f"{name} has {there} tables on its page, but {len(tables)} are written")
    fresh = iter(tables)
    return TABLE.sub(lambda _: next(fresh), page)
