"""Write a checkpoint whose weights hold a policy's value basis.

After ZACK, sections 4.1 and 4.2. Of each layer, `v_proj` computes values in the basis, with all
dimensions, and `o_proj` reads them, so every engine computes what it did before. Under the policy a
cache then stores the first dimensions of a value as they are.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kv_policy import FoldsValues, KVPolicy
from kv_policy.files import write_whole
from kv_runtime import check_basis
from kv_transformers.fitted import expect_fitted
from kv_transformers.models.convert import MANIFEST
from kv_transformers.models.folder import fingerprint, read_config, weight_files, written
from kv_transformers.models.load import load_weights, model_folder
from kv_transformers.models.mark import MARK, FoldMark
from kv_transformers.models.source import ModelError, Progress
from kv_transformers.support import UnsupportedModelError, cache_shape
from kv_transformers.turned import Turn, Turned, turn_checked, turned

CONFIG: Final = "config.json"
ADAPTER: Final = "adapter_config.json"
# Weights in other formats would be those of the model before.
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
WEIGHTS_INDEX: Final = (".bin.index.json", ".h5.index.json", ".msgpack.index.json")


def write_folded(
    name: str | None, policy: KVPolicy, out: Path, *, progress: Progress | None = None
) -> FoldMark:
    """Write a checkpoint of the same shapes with the value basis of a policy in its weights.

    The model is loaded once, to check that its code reads values head by head; then its weight
    files are rewritten one by one, so memory holds the model or a file. All other files are copied.
    The folder appears when it is whole.

    Args:
        name: the model, as for `load_model`.
        policy: a policy whose basis truncates a rotation of values, such as `zack`.
        out: a folder that does not exist, or is empty.
        progress: called with each step; None: silent.

    Returns:
        The mark of the written checkpoint.

    Raises:
        ModelError: the model cannot be found, downloaded or read, has quantized weights or an
            adapter, or is folded already; or the folder is not empty or cannot be written.
        UnsupportedModelError: a basis cannot be in its projections.
        ValueError: the policy has no such basis, or was calibrated with another model.
    """
    basis, say = policy.basis, progress or _silent
    if not isinstance(basis, FoldsValues):
        raise ValueError(
            f"{policy} has no value basis that a checkpoint can hold; use zack, whose basis of "
            "values is a rotation"
        )
    expect_free(out)
    folder = model_folder(name, progress=progress)
    _expect_plain(folder)
    source = fingerprint(folder)
    expect_fitted(policy, source)
    changes = _changes(folder, name or folder.name, policy, basis, say)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with written(out, out.name[:32]) as partial:
            mark = _write(folder, partial, basis.value_fingerprint, source, changes, say)
            umask = os.umask(0)
            os.umask(umask)
            partial.chmod(0o777 & ~umask)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ModelError(
            f"{out} cannot be written ({reason or error}); it needs as much space as {folder}"
        ) from error
    return mark


def expect_free(out: Path) -> None:
    """Raise if a folder cannot be written because something is there.

    Raises:
        ModelError: it is a file, or a folder with files.
    """
    try:
        if out.is_dir() and not any(out.iterdir()):
            return
        there = out.exists() or out.is_symlink()
    except OSError as error:
        raise ModelError(f"{out} cannot be written ({error.strerror or error})") from error
    if there:
        what = "has files in it" if out.is_dir() else "is a file"
        raise ModelError(f"{out} {what}; name a folder that does not exist, or an empty one")


def _expect_plain(folder: Path) -> None:
    """Raise if a folder's weights are not all there is to the model, or are not plain numbers."""
    config = read_config(folder)
    if MARK in config:
        raise ModelError(
            f"{folder} is a folded checkpoint already; fold the model that it was made from"
        )
    texts = [each for each in (config, config.get("text_config")) if isinstance(each, Mapping)]
    if any(
        each.get(key) for each in texts for key in ("quantization_config", "compression_config")
    ):
        raise ModelError(
            f"the weights in {folder} are quantized, and a rotation would be lost in their codes; "
            "fold the model before it was quantized, and quantize the result"
        )
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"{folder} has an adapter ({ADAPTER}), which is added to the weights when they are "
            "loaded; merge it into the model first"
        )


def _changes(
    folder: Path, name: str, policy: KVPolicy, basis: FoldsValues, say: Progress
) -> dict[str, Turn]:
    """Load the model, check it, and return what happens to which tensors of its files."""
    say(f"loading {name} to check its projections")
    model = load_weights(folder, name)
    shape = cache_shape(model)
    check_basis(policy, shape)
    for layer in range(shape.layers):
        basis.bind(layer, shape)  # whose errors name the sizes that differ
    found = turned(model, basis, shape)
    changes = _by_tensor(weight_files(folder), found)
    say("comparing outputs with the basis in the weights")
    turn_checked(model, found)
    return changes


def _by_tensor(files: Sequence[Path], found: Sequence[Turned]) -> dict[str, Turn]:
    """Return the turns by the names that the parameters have in the files.

    Raises:
        UnsupportedModelError: a parameter is not one tensor there, with equal elements.
    """
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)
    changes: dict[str, Turn] = {}
    for each in found:
        name = _named(each.name, where)
        if name is None or name in changes or not _equal(where[name], name, each.own):
            raise UnsupportedModelError(
                f"{each.name} is not a tensor of its own in the checkpoint: it is computed from "
                "others when the model is loaded, or named otherwise, so a basis cannot be folded "
                "into it; use the policy's cache without folding"
            )
        changes[name] = each.turn  # not the parameter, so that the model is freed
    return changes


def _named(name: str, names: Collection[str]) -> str | None:
    """Return the name that ends like one of the base model, by as many parts as possible."""
    parts = name.split(".")
    for i in range(len(parts) - 2):  # at least the projection, its module and its parameter
        end = ".".join(parts[i:])
        found = [each for each in names if each == end or each.endswith(f".{end}")]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _equal(file: Path, name: str, own: Tensor) -> bool:
    with safe_open(file, "pt") as opened:
        there = opened.get_tensor(name)
    return there.is_floating_point() and there.itemsize >= 2 and torch.equal(there.to(own), own)


def _write(
    folder: Path,
    into: Path,
    basis: str,
    source: str,
    changes: Mapping[str, Turn],
    say: Progress,
) -> FoldMark:
    files = weight_files(folder)
    for number, file in enumerate(files, 1):
        say(f"writing {file.name} ({number} of {len(files)})")
        _rewrite(file, into / file.name, basis, changes)
    for path in sorted(folder.iterdir()):
        if path.is_file() and not _is_left_out(path.name):
            shutil.copyfile(path, into / path.name)
    mark = FoldMark(basis, source, fingerprint(into))
    config: dict[str, Any] = {**read_config(folder), MARK: msgspec.to_builtins(mark)}
    write_whole(into / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    return mark


def _rewrite(file: Path, into: Path, basis: str, changes: Mapping[str, Turn]) -> None:
    """Write a weight file with the basis in the tensors that change, and sync it to disk."""
    with safe_open(file, "pt") as opened:
        given, names = opened.metadata() or {}, opened.keys()
        tensors = {name: opened.get_tensor(name) for name in names}
    for name in tensors.keys() & changes.keys():
        tensors[name] = changes[name](tensors[name])
    save_file(tensors, into, {"format": "pt", **given, MARK: basis})
    with into.open("rb") as stream:
        os.fsync(stream.fileno())


def _is_left_out(name: str) -> bool:
    """Whether a file has weights, or facts about them that no longer hold."""
    return name.endswith((*WEIGHTS, *WEIGHTS_INDEX)) or name == MANIFEST


def _silent(line: str) -> None:
    del line
