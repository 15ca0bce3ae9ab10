"""HTML from functions: everything that is not `Markup` is escaped."""

from collections.abc import Mapping
from html import escape
from typing import Final, NewType

Markup = NewType("Markup", str)  # lets type checkers reject plain text as markup
Value = str | float | int | None

NOTHING: Final = Markup("")
_VOID: Final = frozenset({"meta", "br"})


def text(value: str) -> Markup:
    """Escape a text."""
    return Markup(escape(value))


def tag(name: str, attributes: Mapping[str, Value] | None = None, *content: Markup) -> Markup:
    """Write an element.

    Args:
        name: of the element.
        attributes: by name; values are escaped, numbers are rounded to hundredths, and None is
            omitted.
        content: child elements in order.
    """
    given = {key: value for key, value in (attributes or {}).items() if value is not None}
    written = "".join(f' {key}="{escape(_value(value))}"' for key, value in given.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{''.join(content)}</{name}>")


def join(*pieces: Markup) -> Markup:
    """Concatenate markup."""
    return Markup("".join(pieces))


def _value(value: str | float | int) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):g}"
