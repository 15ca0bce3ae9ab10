"""What every command shares: where text goes, and how a refusal is said."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from rich.progress import Progress

USER_ERROR: Final = 2
INTERRUPTED: Final = 130
WIDE: Final = 200


def out() -> Console:
    """Results, on standard output; in a file or a pipe, lines are not broken to fit a screen."""
    return Console(width=None if sys.stdout.isatty() else WIDE)


def err() -> Console:
    """Progress and remarks, on standard error."""
    return Console(stderr=True)


def progress() -> "Progress":
    """A bar on standard error: what is done, how much of it, and an estimate of the time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err())


def refuse(sentence: str) -> NoReturn:
    """Say what is wrong with the input and leave with status 2."""
    err().print(f"[bold red]Error:[/] {escape(sentence)}", soft_wrap=True)
    raise typer.Exit(USER_ERROR)


def remark(sentence: str) -> None:
    """Say something in passing, dimmed, on standard error."""
    err().print(f"[dim]{escape(sentence)}[/]", soft_wrap=True)


@contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Turn these exceptions, whose messages are sentences, into refusals."""
    try:
        yield
    except errors as error:
        refuse(str(error))


def check_writable(path: Path, option: str = "--json") -> None:
    """Refuse a file that could not be written in the end; its folder is made."""
    from kv_policy.files import expect_writable

    try:
        expect_writable(path)
    except IsADirectoryError:
        refuse(f"{option} {path} is a folder; name a file")
    except OSError as error:
        refuse(f"{option} {path} cannot be written: {error.strerror}")
