"""Checkpoints of an unfinished calibration."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from kv_policy import Resumable
from kv_policy.decoding import decode
from kv_policy.files import set_aside, write_whole

MAGIC: Final = b"kv-serve calibration 2 "  # followed by a checksum of the rest


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the state, the number of windows read, and the seconds spent."""

    settings: dict[str, object]
    windows: int
    seconds: float


class Partial:
    """The state of a calibrator after some windows, written atomically.

    The file is a line with a checksum of the rest, a line of JSON, and safetensors.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        """Start empty; the settings are those that the state depends on."""
        self.path = path
        self.windows = 0
        self.seconds = 0.0
        self._settings: dict[str, object] = msgspec.json.decode(
            msgspec.json.encode(dict(settings)), type=dict[str, object]
        )

    def resume(self, calibrator: Resumable) -> str:
        """Resume from the file if it is intact and its settings match; else rename it aside.

        Returns:
            A sentence about the outcome; empty if the file does not exist.

        Raises:
            ValueError: the file cannot be read or renamed, or is a folder.
        """
        if not os.path.lexists(self.path):
            return ""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"the state in {self.path} cannot be read: {error.strerror}; move it away to start "
                "over, or make it readable to resume from it"
            ) from None
        try:
            head, found = read_state(data)
            changed = [
                f"{key} was {head.settings.get(key)!r} and is {self._settings.get(key)!r}"
                for key in {**self._settings, **head.settings}
                if head.settings.get(key) != self._settings.get(key)
            ]
            if changed:
                raise ValueError(f"its settings differ: {'; '.join(changed)}")
            calibrator.restore(found)
        except (ValueError, SafetensorError) as error:
            try:
                aside = set_aside(self.path)
            except OSError as refused:
                raise ValueError(
                    f"{self.path} cannot be resumed ({error}), and cannot be renamed: "
                    f"{refused.strerror}; move it away"
                ) from None
            return (
                f"{self.path} cannot be resumed: {error}. It is renamed to {aside}. Starting over."
            )
        self.windows, self.seconds = head.windows, head.seconds
        return f"Resuming from {self.path} after {calibrator.tokens:,} tokens."

    def save(self, calibrator: Resumable) -> None:
        """Write the state atomically.

        Raises:
            ValueError: writing failed.
        """
        head = msgspec.json.encode(Head(self._settings, self.windows, self.seconds))
        body = head + b"\n" + to_bytes(calibrator.state())
        try:
            write_whole(self.path, MAGIC + _checksum(body) + b"\n" + body)
        except OSError as error:
            raise ValueError(
                f"the state in {self.path} cannot be written: {error.strerror}; the previous "
                "checkpoint is unchanged"
            ) from error

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        self.path.unlink(missing_ok=True)


def is_partial(data: bytes) -> bool:
    """Return whether a file's bytes are a checkpoint of a calibration."""
    return data.startswith(MAGIC)


def read_state(data: bytes) -> tuple[Head, dict[str, Tensor]]:
    """Parse the bytes of a checkpoint and verify its checksum.

    Raises:
        ValueError: the bytes are damaged or not a checkpoint; the message is a clause.
    """
    first, _, body = data.partition(b"\n")
    if not first.startswith(MAGIC):
        raise ValueError("it is from an earlier version, or not a calibration state")
    if first != MAGIC + _checksum(body):
        raise ValueError("it is damaged: its checksum does not match")
    head, _, tensors = body.partition(b"\n")
    return decode(head, Head), from_bytes(tensors)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
