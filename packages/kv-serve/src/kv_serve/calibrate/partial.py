"""What an unfinished calibration has learnt, in a file to go on from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from kv_policy import Calibrator

FORMAT: Final = "kv-serve calibration 1"


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    settings: dict[str, object]
    windows: int
    seconds: float


class Partial:
    """The state of a calibrator after some windows, written whole or not at all."""

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        """Begin with nothing; the settings say what the state depends on."""
        self.path = path
        self.windows = 0
        self.seconds = 0.0
        self._settings: dict[str, object] = msgspec.json.decode(
            msgspec.json.encode(dict(settings)), type=dict[str, object]
        )

    def resume(self, calibrator: Calibrator) -> str:
        """Go on from the file if it is of the same settings; say in a sentence what was done."""
        if not self.path.exists():
            return ""
        try:
            head, found = self._read()
            changed = [
                f"{key} was {head.settings.get(key)!r} and is {self._settings.get(key)!r}"
                for key in {**self._settings, **head.settings}
                if head.settings.get(key) != self._settings.get(key)
            ]
            if changed:
                raise ValueError(f"it is of other settings: {'; '.join(changed)}")
            calibrator.restore(found)
        except (ValueError, SafetensorError, OSError) as error:
            return f"{self.path} cannot be gone on from, for {error}. Starting anew."
        self.windows, self.seconds = head.windows, head.seconds
        return f"Going on from {self.path}, where {calibrator.tokens:,} tokens are read."

    def save(self, calibrator: Calibrator) -> None:
        """Write the state; the file that is there is replaced only when all is written."""
        head = _Head(self._settings, self.windows, self.seconds)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_bytes(
            to_bytes(calibrator.state(), {FORMAT: msgspec.json.encode(head).decode()})
        )
        os.replace(fresh, self.path)

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> tuple[_Head, dict[str, Tensor]]:
        with safe_open(self.path, framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT)
            names = file.keys()
            found = {name: file.get_tensor(name) for name in names}
        if text is None:
            raise ValueError(f"it is no {FORMAT!r}")
        try:
            return msgspec.json.decode(text, type=_Head), found
        except msgspec.MsgspecError as error:
            raise ValueError(f"its head is damaged: {error}") from None
