"""Reading a `kv-serve` command with the command's own parser, without running it."""

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
    """The command that words name, as far as they do, and what is left of them."""
    command = get_command(app)
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def read_command(words: list[str]) -> None:
    """Lets the command's parser read its arguments, and looks its policies up."""
    command, rest = reach(words)
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        raise ValueError(f"kv-serve has no command {rest[0]!r}")
    with contextlib.suppress(Exit):  # that is --help
        command.make_context("kv-serve", list(rest))
    for option, value in itertools.pairwise(rest):
        if option == "--policy":
            look_up(value)


def look_up(policies: str) -> None:
    """Looks up the policies of a list; a file that one names need not be there."""
    if not re.search(r"\b(file|profile)=", policies):
        read_specs([policies])
        return
    for part in split(policies, "+"):  # the file is not there
        name, _, options = part.partition(":")
        known = {parameter.name for parameter in load(name).parameters()}
        given = {each.partition("=")[0] for each in options.split(",") if each}
        if given - known:
            raise ValueError(f"{name} has no parameters {sorted(given - known)}")
