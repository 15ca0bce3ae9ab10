"""What a result was measured with: the commit of this code, the model and the text."""

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kv_eval.tasks import Text
    from kv_transformers.models import LoadedModel

_OWN: Final = Path(__file__).resolve()


def commit(file: Path = _OWN) -> str:
    """Name the commit that `file` is tracked in, `-dirty` behind it if the tree differs from it.

    Where the file is in no checkout, or there is no git, this is the installed version instead.
    """
    folder = str(file.parent)
    tracked = _git(folder, "ls-files", "--error-unmatch", file.name)
    found = _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    if tracked is None or not found:
        return f"kv-eval {version('kv-eval')}"
    return found


def model_identity(loaded: "LoadedModel") -> dict[str, str | int]:
    """Name the model that a result is about, its numbers and its device."""
    return {
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.model.dtype),
        "device": loaded.model.device.type,
    }


def subject(loaded: "LoadedModel", text: "Text") -> dict[str, str | int]:
    """Name the model and the text that a result is about."""
    return model_identity(loaded) | {"text": f"{text.name} {text.digest}"}


def _git(folder: str, *arguments: str) -> str | None:
    command = ("git", "-C", folder, *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
