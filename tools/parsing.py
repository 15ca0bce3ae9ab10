"""Parsing of `kv-serve` commands with their own parser, without running them."""

import contextlib
import itertools
import re
from typing import Any

from typer import Exit
from typer.main import get_command

from kv_eval.evaluate.specs import read_specs
from kv_policy import load
from kv_policy.part import split
from kv_serve.cli import app


def reach(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the leading words name, and the remaining words."""
    command = get_command(app)
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def read_command(words: list[str]) -> None:
    """Parse a command's arguments, and look up its policies."""
    command, rest = reach(words)
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        raise ValueError(f"kv-serve has no command {rest[0]!r}")
    with contextlib.suppress(Exit):  # raised by --help
        command.make_context("kv-serve", list(rest))
    for option, value in itertools.pairwise(rest):
        if option == "--policy":
            look_up(value)


def look_up(policies: str) -> None:
    """Look up the policies of a list; the files they name need not exist."""
    if not re.search(r"\b(file|profile)=", policies):
        read_specs([policies])
        return
    for part in split(policies, "+"):  # the file does not exist
        name, _, options = part.partition(":")
        known = {parameter.name for parameter in load(name).parameters()}
        given = {each.partition("=")[0] for each in options.split(",") if each}
        if given - known:
            raise ValueError(f"{name} has no parameters {sorted(given - known)}")
