"""`kv-serve policies`: list the installed policies and their parameters."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from kv_transformers.cli.console import out, refusing

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from kv_policy import Part, Registry

# Headings by the facets that a policy supplies.
GROUPS: Final[Mapping[tuple[str, ...], str]] = {
    ("formats",): "Formats: how tokens are stored",
    ("selector",): "Selectors: which tokens are kept",
    ("selector", "formats"): "Selectors with formats of their own",
    ("basis",): "Bases: which dimensions are stored",
    ("reading",): "Readings: which pages a decode step reads",
}
OTHER: Final = "Others"


def policies(
    name: Annotated[
        str | None,
        typer.Argument(help="List the parameters of this policy; by default, list all policies."),
    ] = None,
) -> None:
    """List the installed policies, or the parameters of one.

    A policy is written name[:key=value[,key=value...]], and several are joined by +, for example
    snapkv:budget=1024,window=32+k8v4.
    """
    from kv_policy import Registry

    registry = Registry.scan()
    if name is not None:
        with refusing(ValueError):
            _one(registry, name)
        return
    groups: dict[str, dict[str, tuple[str, str]]] = {each: {} for each in GROUPS.values()}
    for each in registry.claims:
        title, line = _line(registry, each)
        groups.setdefault(title, {})[each] = line
    for title, lines in groups.items():
        if lines:
            out().print(f"[bold]{title}[/]", highlight=False)
            table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
            for text, (what, source) in collapse(lines).items():
                table.add_row(escape(text), f"{escape(what)} [dim]({escape(source)})[/]")
            out().print(table)
            out().print()
    out().print("`kv-serve policies NAME` lists the parameters of one; a + joins several.")


def collapse(lines: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Join policies of one source whose names and descriptions differ in numbers alone.

    Args:
        lines: description and source by name.

    >>> collapse({"k4v2": ("4 bits and 2", "x"), "k4v4": ("4 bits and 4", "x")})
    {'k4v{2,4}': ('4 bits and {2,4}', 'x')}
    """
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, (said, source) in lines.items():
        alike.setdefault((_numberless(name), _numberless(said), source), []).append(name)
    found: dict[str, tuple[str, str]] = {}
    for (*_, source), names in alike.items():
        joined, what = _joined(names), _joined([lines[each][0] for each in names])
        if len(names) == 1 or joined is None or what is None:
            found |= {each: lines[each] for each in names}
        else:
            found[joined] = what, source
    return found


def _numberless(text: str) -> str:
    return re.sub(r"\d+", "#", _plural(text))


def _plural(text: str) -> str:
    return re.sub(r"\b1 bit\b", "1 bits", text)


def _joined(texts: Sequence[str]) -> str | None:
    """Write texts that differ in numbers as one; None if some combination of these is missing."""
    rows = [re.split(r"(\d+)", _plural(each)) for each in texts]
    numbers = [sorted({*map(int, column)}) for column in [*zip(*rows, strict=True)][1::2]]
    if prod(map(len, numbers)) != len(texts):
        return None
    written = [
        "{" + ",".join(map(str, each)) + "}" if each[1:] else str(each[0]) for each in numbers
    ]
    return "".join(a + b for a, b in zip(rows[0][::2], [*written, ""], strict=True))


def _line(registry: "Registry", name: str) -> tuple[str, tuple[str, str]]:
    """Return the heading of a policy, and its description and source."""
    from kv_policy import BrokenPolicyError

    package = ", ".join(_package(entry) for entry in registry.claims[name])
    # A broken third-party package must not hide the others.
    try:
        part = registry.load(name)
    except BrokenPolicyError as error:
        return OTHER, (f"broken: {error}", package)
    return _heading(part), (_first_line(part.__doc__), part.source or package)


def _heading(part: "type[Part]") -> str:
    """Return the heading of the facets that a policy's class supplies."""
    return GROUPS.get(part.facets(), OTHER)


def _one(registry: "Registry", name: str) -> None:
    part = registry.load(name)
    name = part.name
    console = out()
    console.print(
        f"[bold]{name}[/]: {escape(_first_line(part.__doc__))}", soft_wrap=True, highlight=False
    )
    if part.source:
        console.print(f"source: {escape(part.source)}", soft_wrap=True, highlight=False)
    parameters = part.parameters()
    if not parameters:
        console.print("It has no parameters.")
        return
    table = Table("parameter", "type", "default", "meaning", box=None, padding=(0, 2, 0, 0))
    for parameter in parameters:
        row = (parameter.name, parameter.type, parameter.default, parameter.doc)
        table.add_row(*map(escape, row))
    console.print(table)


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().partition("\n")[0]


def _package(entry: "EntryPoint") -> str:
    return f"package {entry.dist.name}" if entry.dist is not None else "unknown package"
