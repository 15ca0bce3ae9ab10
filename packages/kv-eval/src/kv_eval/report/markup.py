"""HTML that is written by functions: what is not `Markup` is escaped before it is in a page."""

from collections.abc import Mapping
from html import escape
from typing import Final, NewType

Markup = NewType("Markup", str)  # type checkers keep plain text out of where markup is wanted
Value = str | float | int | None

NOTHING: Final = Markup("")
_VOID: Final = frozenset({"meta", "br"})


def text(value: str) -> Markup:
    """Escape a text, so that it is shown as it is."""
    return Markup(escape(value))


def tag(name: str, attributes: Mapping[str, Value] | None = None, *content: Markup) -> Markup:
    """Write an element.

    Args:
        name: of the element.
        attributes: by name; values are escaped, numbers are rounded to hundredths, and what is None
            is left out.
        content: what is inside, one behind the other.
    """
    given = {key: value for key, value in (attributes or {}).items() if value is not None}
    written = "".join(f' {key}="{escape(_value(value))}"' for key, value in given.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{''.join(content)}</{name}>")


def join(*pieces: Markup) -> Markup:
    """Put one behind the other."""
    return Markup("".join(pieces))


def _value(value: str | float | int) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):g}"
