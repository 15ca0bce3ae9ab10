"""What an evaluation has finished, on disk sample by sample, so that it can be gone on with."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from kv_eval.evaluate.records import Records
from kv_policy.decoding import decode

ENDING: Final = ".partial"  # of its name, behind that of the result


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


class Journal:
    """The finished samples of one evaluation, in a file beside its result that survives damage.

    A sample is on the disk before the next one starts.
    """

    def __init__(self, records: Records) -> None:
        """Take over records, each a sample; `start` and `resume` are the ways to make one."""
        self._records = records
        found = [decode(line, Finished) for line in records.lines]
        self._entries = {entry.key: entry for entry in found}

    @classmethod
    def start(cls, path: Path, settings: Mapping[str, object]) -> "Journal":
        """Begin a new file; one that is there is set aside under another name.

        Raises:
            RecordsError: it cannot be written.
        """
        return cls(Records.start(path, settings))

    @classmethod
    def resume(cls, path: Path, settings: Mapping[str, object]) -> tuple["Journal", str]:
        """Go on with a file; also say in a sentence what was kept, and what was set aside.

        Raises:
            RecordsError: it cannot be read or written, or is a folder.
        """
        records, wrong = Records.resume(path, settings, _is_finished)
        journal = cls(records)
        are = "1 sample is" if len(journal) == 1 else f"{len(journal)} samples are"
        if not wrong:
            return journal, f"Going on from {path}, where {are} finished."
        return (
            journal,
            f"{wrong} {f'{are} finished and kept' if len(journal) else 'Starting anew'}.",
        )

    @property
    def path(self) -> Path:
        """The file."""
        return self._records.path

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
            RecordsError: they cannot be written; those of earlier calls are kept.
        """
        entries = list(entries)
        self._records.append([msgspec.json.encode(entry) for entry in entries])
        self._entries |= {entry.key: entry for entry in entries}

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        self._records.remove()


def open_journal(path: Path, settings: Mapping[str, object]) -> tuple[Journal, str]:
    """Go on with a file, or start one; also say in a sentence what was found, if anything was.

    Raises:
        RecordsError: it cannot be read or written, or is a folder.
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
