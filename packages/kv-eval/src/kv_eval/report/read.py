"""Reading result files of `kv-serve eval` for one page."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kv_eval.evaluate.journal import ENDING
from kv_eval.evaluate.records import is_journal
from kv_eval.evaluate.report import Report
from kv_policy.decoding import decode


class ReadError(ValueError):
    """A file cannot be shown on the page; the message is a sentence that names it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A result file: its name on the page, and its content."""

    name: str
    report: Report


def read(paths: Sequence[Path]) -> tuple[Source, ...]:
    """Read result files of one model, in their order.

    A file is shown by its name if that is unique, else by its path.

    Raises:
        ReadError: a file cannot be read, is not a result of `kv-serve eval` or has no rows; two are
            the same file or of different models; or no file is given.
    """
    if not paths:
        raise ReadError("no file is given; name the output of `kv-serve eval --json`")
    reports = [_read(path) for path in paths]
    for i, path in enumerate(paths):
        if os.path.realpath(path) in map(os.path.realpath, paths[:i]):
            raise ReadError(f"the file {path} is given twice; name each file once")
        if reports[i].model != reports[0].model:
            raise ReadError(
                f"{path} is of the model {reports[i].model}, but {paths[0]} is of "
                f"{reports[0].model}; a page compares policies on one model, so make a page of each"
            )
    names = [path.name for path in paths]
    return tuple(
        Source(_text(path.name if names.count(path.name) == 1 else str(path)), report)
        for path, report in zip(paths, reports, strict=True)
    )


def _text(name: str) -> str:
    """Write bytes of a name that are not UTF-8, which Python keeps as surrogates, as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _read(path: Path) -> Report:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ReadError(f"the result file {path} cannot be read: {reason}") from None
    if path.suffix == ENDING or is_journal(data):
        whole = path.with_suffix("") if path.suffix == ENDING else "that file"
        raise ReadError(
            f"{path} holds the samples of an evaluation that has not finished; run the same "
            f"`kv-serve eval` again, which resumes from them, and report on {whole}"
        )
    try:
        report = decode(data, Report)
    except ValueError as error:
        raise ReadError(
            f"{path} is not a result of `kv-serve eval`: {error}; use the --json output of a run "
            "that finished"
        ) from None
    if not report.rows:
        raise ReadError(
            f"{path} has no rows, so nothing was measured; use the result of a run of "
            "`kv-serve eval` with at least one task"
        )
    return report
