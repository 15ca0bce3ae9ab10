"""A file of lines with checksums, to which a long run appends its finished records."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from kv_policy.decoding import decode
from kv_policy.files import set_aside, write_whole

MAGIC: Final = b"kv-serve journal 2 "  # start of the file
_SUM: Final = 32  # hexadecimal digits of a line's checksum


class RecordsError(ValueError):
    """A records file cannot be read or written; the message has the reason and what is kept."""


class Records:
    """Finished records of a run: the first line holds its settings, every other one a record.

    Each line starts with a checksum of itself and of the settings, so that a line that is damaged,
    truncated or copied from a file with other settings is never accepted as a record. A record is
    on disk when `append` returns.

    Attributes:
        path: the file.
        lines: the records, without their checksums.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        """Start without records; use `start` or `resume` to create one with a file."""
        self.path = path
        self.lines: list[bytes] = []
        self._settings = msgspec.json.encode(dict(settings), order="deterministic")

    @classmethod
    def start(cls, path: Path, settings: Mapping[str, object]) -> "Records":
        """Start a new file; an existing one is renamed aside.

        Raises:
            RecordsError: the file cannot be written.
        """
        records = cls(path, settings)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                set_aside(path)
            records._write()
        return records

    @classmethod
    def resume(
        cls,
        path: Path,
        settings: Mapping[str, object],
        known: Callable[[bytes], bool] = lambda line: True,
    ) -> tuple["Records", str]:
        """Resume a file; also return sentences about its defects, if any.

        Every record on an intact line is kept. A file with a damaged line, with other settings or
        of another kind is renamed aside to a new name, and a new one is written.

        Args:
            path: the file.
            settings: everything the records depend on.
            known: whether a line, without its checksum, is a record.

        Raises:
            RecordsError: the file cannot be read or written, or is a folder.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RecordsError(
                f"the samples in {path} cannot be read: {error.strerror}; move it away to start "
                "over, or make it readable to resume from it"
            ) from None
        records = cls(path, settings)
        wrong = records.take(data, known)
        if not wrong:
            return records, ""
        with _writing(path):
            aside = set_aside(path)
            records._write()
        return records, f"{path} {wrong}. It is renamed to {aside}."

    def append(self, lines: Sequence[bytes]) -> None:
        """Append records, on disk and in memory; a record must not contain a line break.

        Raises:
            RecordsError: writing failed; earlier records are kept.
        """
        count = "1 sample is" if len(self.lines) == 1 else f"{len(self.lines)} samples are"
        with _writing(self.path, f"; {count} saved there, and the same command resumes from it"):
            file = os.open(self.path, os.O_RDWR | os.O_APPEND)
            try:
                _put(file, b"".join(map(self._sealed, lines)))
            finally:
                os.close(file)
        self.lines += lines

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        self.path.unlink(missing_ok=True)

    def take(self, data: bytes, known: Callable[[bytes], bool] = lambda line: True) -> str:
        """Take the records of a file's bytes; return the defect as a predicate, or empty."""
        first, *rest = data.split(b"\n")
        if not first.startswith(MAGIC) and first.startswith(b"{"):
            return "is from an earlier version, whose samples have no checksums"
        whole = rest[-1:] == [b""]  # the last line must end with a line break
        found = [self._read(line, known) for line in (rest[:-1] if whole else rest)]
        lines = [line for line in found if line is not None]
        damaged = found.count(None) + (not whole and None not in found[-1:])
        if first != self._head():
            asked = _settings_of(first)
            if asked is not None:
                wanted = decode(self._settings, dict)
                return f"has samples of other settings: {_differences(asked, wanted)}"
            damaged += 1
            if not lines:
                return "is not an evaluation journal, or its first line is damaged"
        self.lines = lines
        lines_are = "1 damaged line" if damaged == 1 else f"{damaged} damaged lines"
        return f"has {lines_are}" if damaged else ""

    def _head(self) -> bytes:
        return MAGIC + _checksum(self._settings) + b" " + self._settings

    def _write(self) -> None:
        sealed = map(self._sealed, self.lines)
        write_whole(self.path, b"".join((self._head(), b"\n", *sealed)))

    def _sealed(self, line: bytes) -> bytes:
        return _checksum(self._settings, line) + b" " + line + b"\n"

    def _read(self, sealed: bytes, known: Callable[[bytes], bool]) -> bytes | None:
        found, _, line = sealed.partition(b" ")
        return line if found == _checksum(self._settings, line) and known(line) else None


def is_journal(data: bytes) -> bool:
    """Return whether a file's bytes are a journal."""
    return data.startswith(MAGIC)


@contextmanager
def _writing(path: Path, kept: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordsError(
            f"the samples in {path} cannot be written: {error.strerror}{kept}"
        ) from error


def _put(file: int, data: bytes) -> None:
    """Append lines to a file and sync it; first terminate an unfinished line."""
    if os.fstat(file).st_size:
        os.lseek(file, -1, os.SEEK_END)
        if os.read(file, 1) != b"\n":
            data = b"\n" + data
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
    os.fsync(file)


def _checksum(*parts: bytes) -> bytes:
    """Return the checksum of a line; the settings come first, so that it fits no others."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:_SUM].encode()


def _settings_of(first: bytes) -> dict[str, object] | None:
    """Return the settings in a first line; None if it is damaged or something else."""
    found, _, settings = first.removeprefix(MAGIC).partition(b" ")
    if not first.startswith(MAGIC) or found != _checksum(settings):
        return None
    try:
        return decode(settings, dict)
    except ValueError:
        return None


def _differences(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    return "; ".join(f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys)
