"""`kv-serve policies`: list the installed policies and their parameters."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kv_transformers.cli.console import out, refusing

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from kv_policy import Registry


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
    table = Table("policy", "what it does, and its source", box=None, padding=(0, 2, 0, 0))
    for each in registry.claims:
        what, source = map(escape, _line(registry, each))
        table.add_row(escape(each), f"{what} [dim]({source})[/]")
    out().print(table)


def _line(registry: "Registry", name: str) -> tuple[str, str]:
    from kv_policy import BrokenPolicyError

    package = ", ".join(_package(entry) for entry in registry.claims[name])
    # A broken third-party package must not hide the others.
    try:
        part = registry.load(name)
    except BrokenPolicyError as error:
        return f"broken: {error}", package
    return _first_line(part.__doc__), part.source or package


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
