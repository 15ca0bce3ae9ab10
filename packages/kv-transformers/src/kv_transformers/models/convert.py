"""Convert GGUF to safetensors once, into a cached folder that other hosts can also serve."""

import hashlib
import os
import re
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError

from kv_policy.decoding import decode
from kv_transformers.models.folder import plain, written
from kv_transformers.models.quiet import muted, quiet
from kv_transformers.models.source import ModelError, Progress, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2  # of the converted folder; a folder with another number is converted again
MANIFEST = "kv-serve.json"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_NEEDED = frozenset({"config.json"})


class FileRecord(msgspec.Struct, frozen=True):
    """The size in bytes and SHA-256 of a written file."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The source of a converted folder and the files it must contain."""

    format: int
    source: str
    size: int
    sha256: str
    files: dict[str, FileRecord]


def cache_root() -> Path:
    """Return the cache folder: `KV_SERVE_CACHE`, or `kv-serve` in the user's cache folder."""
    if own := os.environ.get("KV_SERVE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kv-serve"


def place(source: Source) -> tuple[Path, str]:
    """Return the folder for a GGUF file's safetensors, existing or not, and the file's SHA-256."""
    assert source.path is not None
    sha256 = source.sha256 or _sha256(source.path)
    key = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.path.stem)}-{sha256[:16]}"
    return cache_root() / "models" / key, sha256


def converted_folder(source: Source, progress: Progress) -> Path:
    """Return the folder with the safetensors of a GGUF file, converting it if needed.

    Several processes may call this at once: one converts and the others wait. An interrupted
    conversion leaves only a partial folder, which the next conversion deletes.

    Args:
        source: Of kind `gguf`.
        progress: Called with each step.

    Raises:
        ModelError: the file is damaged or not supported by transformers, or the cache folder
            cannot be written.
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
            with written(folder, key) as partial:
                _convert(source, partial, progress)
                _write_manifest(source, sha256, partial)
                if folder.exists():
                    shutil.rmtree(folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ModelError(
            f"cannot write the converted model under {folder.parent} ({reason or error}); it"
            " needs about three times the size of the GGUF file. Set KV_SERVE_CACHE to a folder"
            " with enough space"
        ) from error
    progress(f"converted to {folder}")
    return folder


def damage(folder: Path) -> str | None:
    """Return the damage of a converted folder as a clause, or None; reads all of its bytes."""
    try:
        manifest = decode((folder / MANIFEST).read_bytes(), Manifest)
        if manifest.format != FORMAT:
            return f"it has format {manifest.format}, but this version writes {FORMAT}"
        if not folder.name.endswith(f"-{manifest.sha256[:16]}"):
            return f"{MANIFEST} belongs to another file, whose SHA-256 is {manifest.sha256}"
        strange = [name for name in manifest.files if not plain(name)]
        if strange:
            return f"{MANIFEST} names the file {strange[0][:200]!r}, which is not in its folder"
        if not {*manifest.files} >= _NEEDED or not any(map(_is_weights, manifest.files)):
            return f"{MANIFEST} names no config or no weights"
        unknown = sorted(
            path.name
            for path in folder.iterdir()
            if (path.name in _NEEDED or _is_weights(path.name)) and path.name not in manifest.files
        )
        if unknown:
            return f"{unknown[0]} is not named in {MANIFEST}"
        for name, record in manifest.files.items():
            size = (folder / name).stat().st_size
            if size != record.size:
                return f"{name} has {size} bytes instead of {record.size}"
            if _sha256(folder / name) != record.sha256:
                return f"the contents of {name} have changed"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} or a file that it names cannot be read: {error}"
    return None


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _lock(path: Path, progress: Progress) -> AbstractContextManager[object]:
    """Hold a file lock for the block; the system releases it if the process dies."""
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
            f"{source.path} is not a GGUF file (it begins with {magic!r}); {source.remedy}"
        )
    if source.sha256 is not None and _sha256(source.path) != sha256:
        raise ModelError(
            f"{source.path} does not match the checksum in its package; {source.remedy}"
        )


def _convert(source: Source, folder: Path, progress: Progress) -> None:
    """Write bfloat16 weights, config, and tokenizer with chat template into a folder."""
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
            _name_special_tokens(source.path, tokenizer)
            progress(f"converting {file}: unpacking the weights")
            with muted():
                model = AutoModelForCausalLM.from_pretrained(
                    where,
                    gguf_file=file,
                    dtype=torch.bfloat16,
                    trust_remote_code=False,
                    **_unpacked(),
                )
        except Exception as error:  # the readers may fail in any way on a damaged file
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
            del model.config.quantization_config  # the weights are dequantized
        progress(f"converting {file}: writing safetensors")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _name_special_tokens(path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Give a tokenizer the special tokens of its GGUF file.

    transformers before 5.18 leaves some out and reads the beginning for the end.
    """
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    for kind, name in _SPECIAL.items():
        if (given := fields.get(f"tokenizer.ggml.{name}_token_id")) is None:
            continue
        token = tokenizer.convert_ids_to_tokens(int(given.contents()))
        if getattr(tokenizer, kind) != token:
            setattr(tokenizer, kind, token)


def _unpacked() -> dict[str, Any]:
    """Return the option that dequantizes GGUF weights; older versions of transformers lack it."""
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
