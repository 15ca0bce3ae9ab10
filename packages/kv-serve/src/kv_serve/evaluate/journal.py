"""What an evaluation has finished, on disk sample by sample, so that it can be gone on with."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from kv_policy.decoding import decode
from kv_policy.files import set_aside, write_whole

MAGIC: Final = b"kv-serve journal 2 "  # what the file begins with
ENDING: Final = ".partial"  # of its name, behind that of the result
_SUM: Final = 32  # hexadecimal digits of a record's checksum


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One sample under one cache."""

    policy: str
    task: str
    setting: str
    sample: int
    score: float
    kv_bytes: int  # held after the prompt
    full_bytes: int  # what an uncompressed cache takes for it
    seconds: float
    tokens: tuple[int, ...] = ()  # what was generated
    kept: tuple[tuple[int, ...], ...] = ()  # tokens after the prompt, by layer and KV head
    length: int = 0  # tokens of the prompt, where it is not the one that was asked for

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Which sample under which cache."""
        return self.policy, self.task, self.setting, self.sample


class JournalError(ValueError):
    """A journal cannot be read or written; the message says why, and what is kept."""


class Journal:
    """The finished samples of one evaluation in a file of lines beside its result.

    The first line holds the settings, every other one a sample; each begins with a checksum of
    itself and of the settings, so that a line that was damaged, cut off or copied from a journal
    of other settings is never taken for a sample. A line is on the disk before the next sample
    starts.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        """Begin without samples; `start` and `resume` are the ways to make one with a file."""
        self.path = path
        self._settings = _encoded(settings)
        self._entries: dict[tuple[str, str, str, int], Finished] = {}

    @classmethod
    def start(cls, path: Path, settings: Mapping[str, object]) -> "Journal":
        """Begin a new file; one that is there is set aside under another name.

        Raises:
            JournalError: it cannot be written.
        """
        journal = cls(path, settings)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                set_aside(path)
            journal._write()
        return journal

    @classmethod
    def resume(cls, path: Path, settings: Mapping[str, object]) -> tuple["Journal", str]:
        """Go on with a file; also say in a sentence what was kept, and what was set aside.

        Every sample whose line is undamaged is kept. A file with a damaged line, of other settings
        or of another kind is set aside under a name that did not exist, and a new one is written.

        Raises:
            JournalError: it cannot be read or written, or is a folder.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise JournalError(
                f"the samples in {path} cannot be read: {error.strerror}; move it away to start "
                "anew, or make it readable to go on from it"
            ) from None
        journal = cls(path, settings)
        wrong = journal._take(data)
        if not wrong:
            return journal, f"Going on from {path}, where {journal._count()} finished."
        with _writing(path):
            aside = set_aside(path)
            journal._write()
        kept = f"{journal._count()} finished and kept" if journal._entries else "Starting anew"
        return journal, f"{path} {wrong}. It is set aside as {aside}. {kept}."

    def __len__(self) -> int:
        """Samples that are finished."""
        return len(self._entries)

    def get(self, policy: str, task: str, setting: str, sample: int) -> Finished | None:
        """Give a finished sample, or None."""
        return self._entries.get((policy, task, setting, sample))

    def of(self, policy: str, prefix: str) -> list[Finished]:
        """Give the finished samples of a policy in the tasks whose names begin so, in order."""
        return [
            entry
            for entry in self._entries.values()
            if entry.policy == policy and entry.task.startswith(prefix)
        ]

    def append(self, entries: Iterable[Finished]) -> None:
        """Keep finished samples, on the disk and here.

        Raises:
            JournalError: they cannot be written; those of earlier calls are kept.
        """
        entries = list(entries)
        kept = f"; {self._count()} kept there, and the same command goes on from it"
        with _writing(self.path, kept):
            file = os.open(self.path, os.O_RDWR | os.O_APPEND)
            try:
                _put(file, b"".join(map(self._line, entries)))
            finally:
                os.close(file)
        self._entries |= {entry.key: entry for entry in entries}

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        self.path.unlink(missing_ok=True)

    def _take(self, data: bytes) -> str:
        """Take the samples of a file; say what is wrong with it, as a predicate, or nothing."""
        first, *rest = data.split(b"\n")
        if not first.startswith(MAGIC) and first.startswith(b"{"):
            return "is of an earlier version, whose samples have no checksums"
        whole = rest[-1:] == [b""]  # the last line, too, ends as a line does
        lines = rest[:-1] if whole else rest
        found = [self._read(line) for line in lines]
        entries = {entry.key: entry for entry in found if entry is not None}
        damaged = found.count(None) + (not whole and None not in found[-1:])
        if first != self._head():
            asked = _settings_of(first)
            if asked is not None:
                wanted = decode(self._settings, dict)
                return f"has samples of other settings: {_differences(asked, wanted)}"
            damaged += 1
            if not entries:
                return "is no journal of an evaluation, or its first line is damaged"
        self._entries = entries
        lines_are = "1 damaged line" if damaged == 1 else f"{damaged} damaged lines"
        return f"has {lines_are}" if damaged else ""

    def _count(self) -> str:
        return "1 sample is" if len(self) == 1 else f"{len(self)} samples are"

    def _head(self) -> bytes:
        return MAGIC + _checksum(self._settings) + b" " + self._settings

    def _write(self) -> None:
        lines = map(self._line, self._entries.values())
        write_whole(self.path, b"".join((self._head(), b"\n", *lines)))

    def _line(self, entry: Finished) -> bytes:
        data = msgspec.json.encode(entry)
        return _checksum(self._settings, data) + b" " + data + b"\n"

    def _read(self, line: bytes) -> Finished | None:
        found, _, data = line.partition(b" ")
        if found != _checksum(self._settings, data):
            return None
        try:
            return decode(data, Finished)
        except ValueError:
            return None


def open_journal(path: Path, settings: Mapping[str, object]) -> tuple[Journal, str]:
    """Go on with a file, or start one; also say in a sentence what was found, if anything was.

    Raises:
        JournalError: it cannot be read or written, or is a folder.
    """
    if not os.path.lexists(path):
        return Journal.start(path, settings), ""
    return Journal.resume(path, settings)


def is_journal(data: bytes) -> bool:
    """Whether a file's bytes begin as those of a journal do."""
    return data.startswith(MAGIC)


@contextmanager
def _writing(path: Path, kept: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"the samples in {path} cannot be written: {error.strerror}{kept}"
        ) from error


def _put(file: int, data: bytes) -> None:
    """Write lines to the end of a file and to the disk, behind a line that was left unfinished."""
    if os.fstat(file).st_size:
        os.lseek(file, -1, os.SEEK_END)
        if os.read(file, 1) != b"\n":
            data = b"\n" + data
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
    os.fsync(file)


def _checksum(*parts: bytes) -> bytes:
    """Of a sample's line: of the settings first, so that it fits to no others."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:_SUM].encode()


def _encoded(settings: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(dict(settings), order="deterministic")


def _settings_of(first: bytes) -> dict[str, object] | None:
    """The settings in a first line; None if it is damaged or something else."""
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
