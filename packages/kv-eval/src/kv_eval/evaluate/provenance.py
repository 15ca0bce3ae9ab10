"""Provenance of a result: the commit of this code, the model and the text."""

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kv_eval.tasks import Text
    from kv_transformers.models import LoadedModel

_OWN: Final = Path(__file__).resolve()


def commit(file: Path = _OWN) -> str:
    """Return the commit of the checkout that tracks `file`, with `-dirty` if the tree differs.

    If the file is not in a checkout, or git is missing, return the installed version instead.
    """
    folder = str(file.parent)
    tracked = _git(folder, "ls-files", "--error-unmatch", file.name)
    found = _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    if tracked is None or not found:
        return f"kv-eval {version('kv-eval')}"
    return found


def model_identity(loaded: "LoadedModel") -> dict[str, str | int]:
    """Return the identity of the model, its dtype and its device."""
    return {
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.model.dtype),
        "device": loaded.model.device.type,
    }


def subject(loaded: "LoadedModel", text: "Text") -> dict[str, str | int]:
    """Return the identity of the model and the text."""
    return model_identity(loaded) | {"text": f"{text.name} {text.digest}"}


def _git(folder: str, *arguments: str) -> str | None:
    command = ("git", "-C", folder, *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
