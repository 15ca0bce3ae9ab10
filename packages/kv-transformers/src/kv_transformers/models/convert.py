"""GGUF to safetensors, once: the converted model stays in a folder that other hosts can serve."""

import hashlib
import os
import re
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from kv_policy.decoding import decode
from kv_transformers.models.folder import plain
from kv_transformers.models.quiet import muted, quiet
from kv_transformers.models.source import ModelError, Progress, Source

FORMAT = 1  # of the converted folder; another number converts anew
MANIFEST = "kv-serve.json"
_NEEDED = frozenset({"config.json"})


class FileRecord(msgspec.Struct, frozen=True):
    """Size in bytes and SHA-256 of a written file."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a converted folder was made from, and what it must hold."""

    format: int
    source: str
    size: int
    sha256: str
    files: dict[str, FileRecord]


def cache_root() -> Path:
    """The folder for conversions: `KV_SERVE_CACHE`, or `kv-serve` in the user's cache folder."""
    if own := os.environ.get("KV_SERVE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kv-serve"


def place(source: Source) -> tuple[Path, str]:
    """The folder for a GGUF file's safetensors, made or not, and the SHA-256 it is named by."""
    assert source.path is not None
    sha256 = source.sha256 or _sha256(source.path)
    key = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.path.stem)}-{sha256[:16]}"
    return cache_root() / "models" / key, sha256


def converted_folder(source: Source, progress: Progress) -> Path:
    """The folder with the safetensors of a GGUF file, converted now unless it is there and whole.

    Several processes may ask at once: one converts and the others wait. An interrupted conversion
    leaves nothing that could be taken for a model, and the next one clears it away.

    Args:
        source: Of kind `gguf`.
        progress: Told what is being done.

    Raises:
        ModelError: the file is damaged or of a kind that transformers cannot read, or the cache
            folder cannot be written.
    """
    try:
        folder, sha256 = place(source)
    except OSError as error:
        raise ModelError(
            f"cannot read {source.path} ({error.strerror}); {source.remedy}"
        ) from error
    key = folder.name
    if damage(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{key}.lock", progress):
            found = damage(folder)
            if found is None:
                return folder
            if folder.exists():
                progress(f"the converted model is damaged ({found}), converting it again")
            for leftover in folder.parent.glob(f".{key}.*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)
            _check_gguf(source, sha256)
            partial = Path(tempfile.mkdtemp(".partial", f".{key}.", folder.parent))
            try:
                _convert(source, partial, progress)
                _write_manifest(source, sha256, partial)
                if folder.exists():
                    shutil.rmtree(folder)
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ModelError(
            f"cannot write the converted model under {folder.parent} ({reason or error}); it"
            " takes about three times the size of the GGUF file. Set KV_SERVE_CACHE to a folder"
            " that has room"
        ) from error
    progress(f"converted to {folder}")
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with a converted folder, as a clause, or None; all of its bytes are read."""
    try:
        manifest = decode((folder / MANIFEST).read_bytes(), Manifest)
        if manifest.format != FORMAT:
            return f"it has format {manifest.format}, and this version writes {FORMAT}"
        if not folder.name.endswith(f"-{manifest.sha256[:16]}"):
            return f"{MANIFEST} is of another file, whose SHA-256 is {manifest.sha256}"
        strange = [name for name in manifest.files if not plain(name)]
        if strange:
            return f"{MANIFEST} names the file {strange[0][:200]!r}, which is none of its folder"
        if not {*manifest.files} >= _NEEDED or not any(map(_is_weights, manifest.files)):
            return f"{MANIFEST} names no settings or no weights"
        unknown = sorted(
            path.name
            for path in folder.iterdir()
            if (path.name in _NEEDED or _is_weights(path.name)) and path.name not in manifest.files
        )
        if unknown:
            return f"{unknown[0]} is there, and {MANIFEST} does not name it"
        for name, record in manifest.files.items():
            size = (folder / name).stat().st_size
            if size != record.size:
                return f"{name} has {size} bytes and should have {record.size}"
            if _sha256(folder / name) != record.sha256:
                return f"{name} has other contents than were written"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} or a file that it names cannot be read: {error}"
    return None


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _lock(path: Path, progress: Progress) -> AbstractContextManager[object]:
    """Hold the lock until the block ends; the system lets go of it if the process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        progress("another process is converting this model, waiting for it")
        return lock.acquire()


def _check_gguf(source: Source, sha256: str) -> None:
    assert source.path is not None
    try:
        with source.path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelError(
            f"cannot read {source.path} ({error.strerror}); {source.remedy}"
        ) from error
    if magic != b"GGUF":
        raise ModelError(
            f"{source.path} is no GGUF file (it begins with {magic!r}); {source.remedy}"
        )
    if source.sha256 is not None and _sha256(source.path) != sha256:
        raise ModelError(
            f"{source.path} has other contents than its package recorded; {source.remedy}"
        )


def _convert(source: Source, folder: Path, progress: Progress) -> None:
    """Write weights in bfloat16, settings and tokenizer with its chat template into a folder."""
    assert source.path is not None
    progress(f"converting {source.path.name}: importing transformers")
    with quiet():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where, file = str(source.path.parent), source.path.name
        try:
            progress(f"converting {file}: reading the tokenizer")
            with muted():
                tokenizer = AutoTokenizer.from_pretrained(
                    where, gguf_file=file, trust_remote_code=False
                )
            progress(f"converting {file}: unpacking the weights")
            with muted():
                model = AutoModelForCausalLM.from_pretrained(
                    where,
                    gguf_file=file,
                    dtype=torch.bfloat16,
                    trust_remote_code=False,
                    **_unpacked(),
                )
        except Exception as error:  # a damaged file makes the readers fail in any way
            raise ModelError(
                f"{source.path} cannot be read as a model ({type(error).__name__}: {error}); it is"
                " damaged, or of an architecture that transformers does not convert;"
                f" {source.remedy}"
            ) from error
        broken = [name for name, p in model.named_parameters() if not p.isfinite().all()]
        if broken:
            raise ModelError(
                f"{source.path} is damaged: {broken[0]} holds values that are not finite;"
                f" {source.remedy}"
            )
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config  # the weights are plain now
        progress(f"converting {file}: writing safetensors")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _unpacked() -> dict[str, Any]:
    """Newer versions of transformers keep GGUF weights packed unless told; older ones never do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _write_manifest(source: Source, sha256: str, folder: Path) -> None:
    assert source.path is not None
    files = {
        path.name: FileRecord(path.stat().st_size, _sha256(path))
        for path in sorted(folder.iterdir())
    }
    size = source.path.stat().st_size
    manifest = Manifest(FORMAT, source.path.name, size, sha256, files)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
