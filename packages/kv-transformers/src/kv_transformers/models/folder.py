"""A model's folder in the Hugging Face layout: is it whole, and which model is it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from kv_transformers.models.source import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLE = 1 << 20  # bytes read at either end of a file of weights


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, each opened far enough to see that it is whole.

    Raises:
        ModelError: `config.json` or weights are missing, or a file is damaged.
    """
    _config(folder)
    if (folder / _SINGLE).is_file():
        names = {_SINGLE}
    elif (folder / _INDEX).is_file():
        names = _named(folder / _INDEX)
    else:
        names = set()
    if not names:
        raise ModelError(
            f"{folder} holds no {_SINGLE} and no {_INDEX}; weights in other formats must be"
            " converted to safetensors first"
        )
    files = tuple(folder / name for name in sorted(names))
    for file in files:
        _check(file)
    return files


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits that tell models apart, from settings, tokenizer and sampled weights.

    Of each weight file the name, the size and the first and last MiB are taken, so that a model of
    many gigabytes need not be read.

    Raises:
        ModelError: as `weight_files`.
    """
    digest = hashlib.sha256()
    files = weight_files(folder)
    config = {key: value for key, value in _config(folder).items() if key != "transformers_version"}
    try:
        digest.update(json.dumps(config, sort_keys=True).encode())
    except RecursionError as error:
        raise ModelError(f"{folder / 'config.json'} is nested too deep to be settings") from error
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
    """The files that an index names, all in its own folder."""
    weights = _read_json(index).get("weight_map")
    if not isinstance(weights, dict):
        raise ModelError(f"{index} is damaged (its weight_map is no object); fetch the model again")
    for name in weights.values():
        if not isinstance(name, str) or not plain(name):
            raise ModelError(
                f"{index} is damaged (it names the file {str(name)[:200]!r}, which is none of its "
                "folder); fetch the model again"
            )
    return set(weights.values())


def plain(name: str) -> bool:
    """Whether a name is of a file in a folder, and of none below or beside it."""
    size = len(name.encode(errors="replace"))
    return 0 < size < 256 and not {*name} & {*"/\\\0"} and name not in (".", "..")


def _check(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ModelError(f"{file} is missing, though the folder lists it; fetch the model again")
    try:
        with safe_open(file, "pt"):  # reads the header, and compares its sizes with the file's
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged ({error}); fetch the model again") from error


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no model: it holds no config.json")
    return _read_json(folder / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is damaged (it holds no JSON object); fetch the model again")
    return content
