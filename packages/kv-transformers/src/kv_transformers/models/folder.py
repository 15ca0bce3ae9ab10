"""Validation and fingerprint of a model's folder in the Hugging Face layout."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kv_transformers.models.mark import MARK
from kv_transformers.models.source import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLE = 1 << 20  # bytes read at each end of a weight file


@contextmanager
def written(path: Path, prefix: str) -> Iterator[Path]:
    """Let a folder be filled beside `path`, and rename it to that at the end.

    An interrupted one is deleted; what a killed process leaves is named `.PREFIX.*.partial`.

    Args:
        path: an empty folder, or nothing, when the block ends.
        prefix: of the name of the folder that is filled.

    Raises:
        OSError: writing failed.
    """
    partial = Path(tempfile.mkdtemp(".partial", f".{prefix}.", path.parent))
    try:
        yield partial
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a folder, after checking each file's header and size.

    Raises:
        ModelError: `config.json` or weights are missing, or a file is damaged.
    """
    read_config(folder)
    if (folder / _SINGLE).is_file():
        names = {_SINGLE}
    elif (folder / _INDEX).is_file():
        names = _named(folder / _INDEX)
    else:
        names = set()
    if not names:
        raise ModelError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}; weights in other formats must be"
            " converted to safetensors first"
        )
    files = tuple(folder / name for name in sorted(names))
    for file in files:
        _check(file)
    return files


def fingerprint(folder: Path) -> str:
    """Return 16 hexadecimal digits that identify a model, from config, tokenizer and weights.

    Each weight file contributes its name, its size and its first and last MiB, so that large files
    are not read in full. The mark of a folded checkpoint, which names it, does not contribute.

    Raises:
        ModelError: as `weight_files`.
    """
    digest = hashlib.sha256()
    files = weight_files(folder)
    left_out = ("transformers_version", MARK)
    config = {key: value for key, value in read_config(folder).items() if key not in left_out}
    try:
        digest.update(json.dumps(config, sort_keys=True).encode())
    except RecursionError as error:
        raise ModelError(f"{folder / 'config.json'} is nested too deeply") from error
    tokenizer = folder / "tokenizer.json"
    try:
        if tokenizer.is_file():
            digest.update(tokenizer.read_bytes())
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLE))
                stream.seek(max(0, size - _SAMPLE))
                digest.update(stream.read(_SAMPLE))
    except OSError as error:
        raise ModelError(f"{error.filename or folder} cannot be read ({error.strerror})") from error
    return digest.hexdigest()[:16]


def _named(index: Path) -> set[str]:
    """Return the files named in an index, which must be in its own folder."""
    weights = _read_json(index).get("weight_map")
    if not isinstance(weights, dict):
        raise ModelError(
            f"{index} is damaged (its weight_map is not an object); download the model again"
        )
    for name in weights.values():
        if not isinstance(name, str) or not plain(name):
            raise ModelError(
                f"{index} is damaged (it names the file {str(name)[:200]!r}, which is not in its "
                "folder); download the model again"
            )
    return set(weights.values())


def plain(name: str) -> bool:
    """Return whether a name is a plain file name, without path components."""
    size = len(name.encode(errors="replace"))
    return 0 < size < 256 and not {*name} & {*"/\\\0"} and name not in (".", "..")


def _check(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ModelError(f"{file} is missing, though the folder lists it; download the model again")
    try:
        with safe_open(file, "pt"):  # reads the header and compares its sizes with the file
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged ({error}); download the model again") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's `config.json`.

    Raises:
        ModelError: it is missing or damaged.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model: it has no config.json")
    return _read_json(folder / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is damaged (it is not a JSON object); download the model again")
    return content
