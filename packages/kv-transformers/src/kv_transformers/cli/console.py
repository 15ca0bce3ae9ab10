"""What every command shares: where text goes, and how a refusal is said."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, runtime_checkable

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from rich.progress import Progress

USER_ERROR: Final = 2
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 1  # also rich's and typer's
WIDE: Final = 200


@runtime_checkable
class _Stream(Protocol):
    """What text is written to."""

    def flush(self) -> None: ...

    def fileno(self) -> int: ...


class _Remarks(Console):
    """Standard error: a command goes on without it where nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _to_nowhere(sys.stderr)


def out() -> Console:
    """Results, on standard output; in a file or a pipe, lines are not broken to fit a screen."""
    return Console(width=None if sys.stdout.isatty() else WIDE)


def err() -> Console:
    """Progress and remarks, on standard error."""
    return _Remarks(stderr=True)


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


@contextmanager
def writing(path: Path, kept: str = "") -> Iterator[None]:
    """Turn a file that cannot be written into a refusal; it ends with what is kept elsewhere."""
    try:
        yield
    except OSError as error:
        refuse(f"{path} cannot be written: {error.strerror or error}{kept}")


@contextmanager
def ending_quietly() -> Iterator[None]:
    """Leave with status 1, and no words, where standard output was closed, as `head` does."""
    results, remarks = sys.stdout, sys.stderr  # typer puts others in their place
    try:
        yield
    finally:
        _flushed(remarks)
        if not _flushed(results):
            raise SystemExit(PIPE_CLOSED)


def _flushed(stream: _Stream) -> bool:
    try:
        stream.flush()
    except BrokenPipeError:
        _to_nowhere(stream)
        return False
    return True


def _to_nowhere(stream: _Stream) -> None:
    """Lead what is still written to a stream, also when Python ends, to nowhere."""
    with suppress(OSError, ValueError):  # a stream of a test has no number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def check_writable(path: Path, option: str = "--json") -> None:
    """Refuse a file that could not be written in the end; its folder is made."""
    from kv_policy.files import expect_writable

    try:
        expect_writable(path)
    except IsADirectoryError:
        refuse(f"{option} {path} is a folder; name a file")
    except OSError as error:
        refuse(f"{option} {path} cannot be written: {error.strerror}")
