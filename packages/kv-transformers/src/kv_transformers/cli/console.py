"""Console output and error reporting, shared by all commands."""

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
PIPE_CLOSED: Final = 1  # as in rich and typer
WIDE: Final = 200


@runtime_checkable
class _Stream(Protocol):
    """An output stream."""

    def flush(self) -> None: ...

    def fileno(self) -> int: ...


class _Remarks(Console):
    """Standard error; a command continues if its reader has closed the pipe."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _to_nowhere(sys.stderr)


def out() -> Console:
    """Return the console for results, on stdout; without line wrapping in a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else WIDE)


def err() -> Console:
    """Return the console for progress and remarks, on stderr."""
    return _Remarks(stderr=True)


def progress() -> "Progress":
    """Return a progress bar on stderr: description, count and estimated time left."""
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
    """Print an error about the input and exit with status 2."""
    err().print(f"[bold red]Error:[/] {escape(sentence)}", soft_wrap=True)
    raise typer.Exit(USER_ERROR)


def remark(sentence: str) -> None:
    """Print a dimmed remark on stderr."""
    err().print(f"[dim]{escape(sentence)}[/]", soft_wrap=True)


@contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Report these exceptions by `refuse`."""
    try:
        yield
    except errors as error:
        refuse(str(error))


@contextmanager
def writing(path: Path, kept: str = "") -> Iterator[None]:
    """Report a failed write by `refuse`; the message ends with `kept`."""
    try:
        yield
    except OSError as error:
        refuse(f"{path} cannot be written: {error.strerror or error}{kept}")


@contextmanager
def ending_quietly() -> Iterator[None]:
    """Exit with status 1 and no message if stdout was closed, as by `head`."""
    results, remarks = sys.stdout, sys.stderr  # typer replaces them
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
    """Redirect further writes to a stream, including those at exit, to the null device."""
    with suppress(OSError, ValueError):  # a stream of a test has no file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def check_writable(path: Path, option: str = "--json") -> None:
    """Exit with an error if a file cannot be written; create its folder."""
    from kv_policy.files import expect_writable

    try:
        expect_writable(path)
    except IsADirectoryError:
        refuse(f"{option} {path} is a folder; name a file")
    except OSError as error:
        refuse(f"{option} {path} cannot be written: {error.strerror}")
