"""The journal of an evaluation: finished samples on disk, to resume from."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from kv_eval.evaluate.records import Records
from kv_policy.decoding import decode

ENDING: Final = ".partial"  # appended to the name of the result


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One sample with one cache."""

    policy: str
    task: str
    setting: str
    sample: int
    score: float
    kv_bytes: int  # cache bytes after the prompt
    full_bytes: int  # of an uncompressed cache
    seconds: float
    tokens: tuple[int, ...] = ()  # generated tokens
    kept: tuple[tuple[int, ...], ...] = ()  # tokens kept after the prompt, by layer and KV head
    divergences: tuple[float, ...] = ()  # from the full cache's distributions, by scored token
    length: int = 0  # tokens of the prompt, if it differs from the requested length
    kept_share: float | None = None  # mean of `kept` over the tokens of the prompt

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The key of the sample and cache."""
        return self.policy, self.task, self.setting, self.sample


class Journal:
    """The finished samples of one evaluation, in a damage-tolerant file beside its result.

    A sample is on disk before the next one starts.
    """

    def __init__(self, records: Records) -> None:
        """Wrap records of samples; use `start` or `resume` to create a journal."""
        self._records = records
        found = [decode(line, Finished) for line in records.lines]
        self._entries = {entry.key: entry for entry in found}

    @classmethod
    def start(cls, path: Path, settings: Mapping[str, object]) -> "Journal":
        """Start a new file; an existing one is renamed aside.

        Raises:
            RecordsError: the file cannot be written.
        """
        return cls(Records.start(path, settings))

    @classmethod
    def resume(cls, path: Path, settings: Mapping[str, object]) -> tuple["Journal", str]:
        """Resume a file; also return a sentence about kept samples and renamed files.

        Raises:
            RecordsError: the file cannot be read or written, or is a folder.
        """
        records, wrong = Records.resume(path, settings, _is_finished)
        journal = cls(records)
        are = "1 sample is" if len(journal) == 1 else f"{len(journal)} samples are"
        if not wrong:
            return journal, f"Resuming from {path}, where {are} finished."
        return (
            journal,
            f"{wrong} {f'{are} finished and kept' if len(journal) else 'Starting over'}.",
        )

    @property
    def path(self) -> Path:
        """The file."""
        return self._records.path

    def __len__(self) -> int:
        """Return the number of finished samples."""
        return len(self._entries)

    def get(self, policy: str, task: str, setting: str, sample: int) -> Finished | None:
        """Return a finished sample, or None."""
        return self._entries.get((policy, task, setting, sample))

    def of(self, policy: str, prefix: str) -> list[Finished]:
        """Return a policy's finished samples of tasks with this name prefix, in order."""
        return [
            entry
            for entry in self._entries.values()
            if entry.policy == policy and entry.task.startswith(prefix)
        ]

    def append(self, entries: Iterable[Finished]) -> None:
        """Add finished samples, on disk and in memory.

        Raises:
            RecordsError: writing failed; earlier samples are kept.
        """
        entries = list(entries)
        self._records.append([msgspec.json.encode(entry) for entry in entries])
        self._entries |= {entry.key: entry for entry in entries}

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        self._records.remove()


def open_journal(path: Path, settings: Mapping[str, object]) -> tuple[Journal, str]:
    """Resume a file, or start one; also return a sentence about an existing file.

    Raises:
        RecordsError: the file cannot be read or written, or is a folder.
    """
    if not os.path.lexists(path):
        return Journal.start(path, settings), ""
    return Journal.resume(path, settings)


def _is_finished(line: bytes) -> bool:
    try:
        decode(line, Finished)
    except ValueError:
        return False
    return True
