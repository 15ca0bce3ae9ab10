"""Commands of other packages in `kv-serve`; a broken one reports the reason and the remedy."""

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from kv_serve.cli import joined

Found = Callable[..., typer.Typer]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Make a command line with the commands of these entry points."""

    def made(*entries: tuple[str, str]) -> typer.Typer:
        points = [EntryPoint(name, value, joined.GROUP) for name, value in entries]
        monkeypatch.setattr(joined, "entry_points", lambda *, group: points)
        app = typer.Typer()
        app.command("doctor")(lambda: typer.echo("the own one"))
        joined.join(app)
        return app

    return made


def said(app: typer.Typer, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    return result.exit_code, " ".join(plain.split())


def hello(name: str) -> None:
    """Greet."""
    typer.echo(f"hello {name}")


several = typer.Typer()
several.command("one")(lambda: typer.echo("one of several"))
several.command("two")(lambda: typer.echo("two of several"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "brings_commands", sys.modules[__name__])


def test_functions_and_groups_join(found: Found) -> None:
    app = found(("hello", "brings_commands:hello"), ("several", "brings_commands:several"))
    assert said(app, "hello", "you") == (0, "hello you")
    assert said(app, "several", "two") == (0, "two of several")


@pytest.mark.parametrize("arguments", [(), ("--policy", "k8v4"), ("--help",)])
def test_a_command_of_a_package_that_is_missing_says_which(
    found: Found, arguments: tuple[str, ...]
) -> None:
    status, text = said(found(), "eval", *arguments)
    assert status == 2
    assert "the command eval is in the package kv-eval, which is not installed: `" in text


def test_help_lists_what_is_missing(found: Found) -> None:
    assert "Needs the package kv-eval." in said(found(), "--help")[1]


def test_a_command_that_two_packages_claim_runs_neither(found: Found) -> None:
    app = found(("hello", "brings_commands:hello"), ("hello", "brings_commands:several"))
    status, text = said(app, "hello", "you")
    assert status == 2
    assert "2 installed packages claim the command 'hello': brings_commands" in text
    assert "uninstall all but one of them" in text


def test_a_command_that_is_found_twice_is_one(found: Found) -> None:
    app = found(("hello", "brings_commands:hello"), ("hello", "brings_commands:hello"))
    assert said(app, "hello", "you") == (0, "hello you")


def test_a_command_that_cannot_be_imported_says_why_and_others_run(found: Found) -> None:
    app = found(("broken", "brings_commands.no_such:thing"), ("hello", "brings_commands:hello"))
    status, text = said(app, "broken", "--any", "thing")
    assert status == 2
    assert (
        "the command 'broken' of brings_commands.no_such cannot be loaded: ModuleNotFound" in text
    )
    assert said(app, "hello", "you") == (0, "hello you")


def test_a_command_of_kv_serve_itself_cannot_be_replaced(found: Found) -> None:
    app = found(("doctor", "brings_commands:hello"))
    assert said(app, "doctor") == (0, "the own one")
