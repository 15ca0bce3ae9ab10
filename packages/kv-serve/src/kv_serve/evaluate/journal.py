"""What an evaluation has finished, on disk sample by sample, so that it can be gone on with."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec


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
    """The finished samples of one evaluation in a file of JSON lines beside its result.

    The first line says what was asked; entries of a file that was asked something else are never
    used. A line is written in one call and reaches the disk before the next sample starts, and a
    last line that was cut off is dropped.
    """

    def __init__(self, path: Path, entries: Mapping[tuple[str, str, str, int], Finished]) -> None:
        """Take over what is there; `start` and `resume` are the ways to make one."""
        self.path = path
        self._entries = dict(entries)

    @classmethod
    def start(cls, path: Path, settings: Mapping[str, object]) -> "Journal":
        """Begin a new file, over one that may be there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(_line(dict(settings)))
        os.replace(fresh, path)
        return cls(path, {})

    @classmethod
    def resume(cls, path: Path, settings: Mapping[str, object]) -> "Journal":
        """Go on with a file that was asked the same.

        Raises:
            ChangedSettingsError: the file was asked something else, or is not such a file.
        """
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines:
            raise ChangedSettingsError(f"{path} says not even what was asked")
        try:
            asked = msgspec.json.decode(lines[0], type=dict[str, object])
            entries = [msgspec.json.decode(line, type=Finished) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise ChangedSettingsError(
                f"{path} is not a file of finished samples: {error}"
            ) from None
        changed = _differences(asked, _plain(settings))
        if changed:
            raise ChangedSettingsError(f"{path} has samples of other settings: {changed}")
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        return cls(path, {entry.key: entry for entry in entries})

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
        """Keep finished samples, on disk in one piece and here."""
        entries = list(entries)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, b"".join(map(_line, entries)))
            os.fsync(file)
        finally:
            os.close(file)
        self._entries |= {entry.key: entry for entry in entries}

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        self.path.unlink(missing_ok=True)


class ChangedSettingsError(ValueError):
    """A file of finished samples cannot be gone on with; the message says what differs."""


def open_journal(path: Path, settings: Mapping[str, object]) -> tuple[Journal, str]:
    """Go on with a file of the same settings, or start it anew; also say in a sentence which."""
    if not path.exists():
        return Journal.start(path, settings), ""
    try:
        journal = Journal.resume(path, settings)
    except ChangedSettingsError as error:
        return Journal.start(path, settings), f"{error}. Starting anew."
    return journal, f"Going on from {path}, where {len(journal)} samples are finished."


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _plain(settings: Mapping[str, object]) -> dict[str, object]:
    return msgspec.json.decode(_line(dict(settings)), type=dict[str, object])


def _differences(asked: dict[str, object], wanted: dict[str, object]) -> str:
    keys = [key for key in {**wanted, **asked} if asked.get(key) != wanted.get(key)]
    return "; ".join(f"{key} was {asked.get(key)!r} and is {wanted.get(key)!r}" for key in keys)
