"""Tables of Markdown: written, found in a section of a page, and put in the place of others."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

TABLE: Final = re.compile(r"^\|.*\|$(?:\n\|.*\|$)*", re.MULTILINE)
TITLE: Final = re.compile(r"^## (\w+)$", re.MULTILINE)
FIGURE: Final = re.compile(r"^\| `(\w+)` \| (.+) \| [^|]+ \|$", re.MULTILINE)

Row = Mapping[str, Any]
Said = Mapping[str, str]
# From a result, and what the page says that its figures are, the tables in the order of the page.
Writer = Callable[[Row, Said], Iterator[str]]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Writes a table."""
    rows = (head, ("---",) * len(head), *lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---")


def figures(result: Row, said: Said) -> str:
    """Writes the figures that a document may quote, as a page names them and in its order.

    Raises:
        ValueError: the page does not say what one of them is.
    """
    summary: Mapping[str, float] = result["summary"]
    if missing := ", ".join(name for name in summary if name not in said):
        raise ValueError(f"say what {missing} of {result['name']} is in a row of the page's table")
    found = [(name, what) for name, what in said.items() if name in summary]
    lines = ((f"`{name}`", what, f"{summary[name]:.4f}") for name, what in found)
    return table(("figure", "what it is", "value"), lines)


def only_figures(result: Row, said: Said) -> Iterator[str]:
    """Writes the figures of a result that needs no other table."""
    yield figures(result, said)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Gives the titles of a page that name a result, each with the text below it."""
    _, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    for part in parts:
        title, _, text = part.partition("\n")
        yield title, text


def section(page: str, name: str) -> str:
    """Gives the text below a title.

    Raises:
        KeyError: no title has this name.
    """
    return dict(sections(page))[name]


def shown(page: str, name: str) -> list[str]:
    """Gives the tables of a section as the page shows them."""
    return TABLE.findall(section(page, name))


def said(page: str, name: str) -> dict[str, str]:
    """Gives what the first table of a section says that its figures are."""
    return dict(FIGURE.findall(shown(page, name)[0]))


def renewed(page: str, name: str, tables: Sequence[str]) -> str:
    """Puts tables in the place of those of a section.

    Raises:
        ValueError: the section has more tables, or fewer.
    """
    old, fresh = section(page, name), iter(tables)
    if (there := len(TABLE.findall(old))) != len(tables):
        raise ValueError(f"{name} has {there} tables on the page, and {len(tables)} are written")
    head = f"\n## {name}\n"
    return page.replace(head + old, head + TABLE.sub(lambda _: next(fresh), old))
