"""Markdown tables: writing them, and finding and replacing them in a section of a page."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

TABLE: Final = re.compile(r"^\|.*\|$(?:\n\|.*\|$)*", re.MULTILINE)
TITLE: Final = re.compile(r"^## (\w+)$", re.MULTILINE)
FIGURE: Final = re.compile(r"^\| `(\w+)` \| (.+) \| [^|]+ \|$", re.MULTILINE)

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
    lines = ((f"`{name}`", what, f"{summary[name]:.4f}") for name, what in found)
    return table(("figure", "what it is", "value"), lines)


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
    yield table(
        ("policy", *cells),
        (
            (f"`{row['policy']}`", *(cell.format_map(row) for cell in cells.values()))
            for row in result["rows"]
        ),
    )


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Yield the titles of a page that name a result, each with the text below it."""
    _, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    for part in parts:
        title, _, text = part.partition("\n")
        yield title, text


def section(page: str, name: str) -> str:
    """Return the text below a title.

    Raises:
        KeyError: no title has this name.
    """
    return dict(sections(page))[name]


def shown(page: str, name: str) -> list[str]:
    """Return the tables of a section as the page has them."""
    return TABLE.findall(section(page, name))


def said(page: str, name: str) -> dict[str, str]:
    """Return the descriptions of the figures in the first table of a section."""
    return dict(FIGURE.findall(shown(page, name)[0]))


def renewed(page: str, name: str, tables: Sequence[str]) -> str:
    """Replace the tables of a section.

    Raises:
        ValueError: the section has more tables, or fewer.
    """
    old, fresh = section(page, name), iter(tables)
    if (there := len(TABLE.findall(old))) != len(tables):
        raise ValueError(f"{name} has {there} tables on the page, but {len(tables)} are written")
    head = f"\n## {name}\n"
    return page.replace(head + old, head + TABLE.sub(lambda _: next(fresh), old))
