"""What an unfinished calibration has learnt, in a file to go on from."""

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

from kv_policy import Calibrator
from kv_policy.decoding import decode
from kv_policy.files import set_aside, write_whole

MAGIC: Final = b"kv-serve calibration 2 "  # then a checksum of all that follows


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the state depends on, the windows that were read, and the seconds that took."""

    settings: dict[str, object]
    windows: int
    seconds: float


class Partial:
    """The state of a calibrator after some windows, written whole or not at all.

    The file is a line with a checksum of the rest, a line of JSON, and safetensors.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        """Begin with nothing; the settings say what the state depends on."""
        self.path = path
        self.windows = 0
        self.seconds = 0.0
        self._settings: dict[str, object] = msgspec.json.decode(
            msgspec.json.encode(dict(settings)), type=dict[str, object]
        )

    def resume(self, calibrator: Calibrator) -> str:
        """Go on from the file if it is undamaged and of the same settings; else set it aside.

        Returns:
            A sentence that says what was done; empty if there is no file.

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
                "anew, or make it readable to resume from it"
            ) from None
        try:
            head, found = read_state(data)
            changed = [
                f"{key} was {head.settings.get(key)!r} and is {self._settings.get(key)!r}"
                for key in {**self._settings, **head.settings}
                if head.settings.get(key) != self._settings.get(key)
            ]
            if changed:
                raise ValueError(f"it is of other settings: {'; '.join(changed)}")
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
                f"{self.path} cannot be resumed: {error}. It is set aside as {aside}. "
                "Starting anew."
            )
        self.windows, self.seconds = head.windows, head.seconds
        return f"Going on from {self.path}, where {calibrator.tokens:,} tokens are read."

    def save(self, calibrator: Calibrator) -> None:
        """Write the state; the file that is there is replaced only when all is written.

        Raises:
            ValueError: it cannot be written.
        """
        head = msgspec.json.encode(Head(self._settings, self.windows, self.seconds))
        body = head + b"\n" + to_bytes(calibrator.state())
        try:
            write_whole(self.path, MAGIC + _checksum(body) + b"\n" + body)
        except OSError as error:
            raise ValueError(
                f"the state in {self.path} cannot be written: {error.strerror}; what an earlier "
                "window left there is unchanged"
            ) from error

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        self.path.unlink(missing_ok=True)


def is_partial(data: bytes) -> bool:
    """Whether a file's bytes begin as those of an unfinished calibration do."""
    return data.startswith(MAGIC)


def read_state(data: bytes) -> tuple[Head, dict[str, Tensor]]:
    """Read the bytes of a file, if none was changed.

    Raises:
        ValueError: the bytes are damaged or something else; the message is a clause.
    """
    first, _, body = data.partition(b"\n")
    if not first.startswith(MAGIC):
        raise ValueError("it is of an earlier version, or no state of a calibration")
    if first != MAGIC + _checksum(body):
        raise ValueError("it is damaged: its checksum does not fit")
    head, _, tensors = body.partition(b"\n")
    return decode(head, Head), from_bytes(tensors)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
