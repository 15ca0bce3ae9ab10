"""Bases in a file: safetensors, with the model they belong to and a checksum."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from kv_policy import HeadBasis, LayerBasis

FORMAT: Final = "kv-svd 1"


def save(path: Path, layers: Sequence[LayerBasis], model: str) -> None:
    """Write the bases of all layers; an existing file is replaced only when all is written.

    Args:
        path: the file, commonly `*.safetensors`.
        layers: one entry per layer, in order.
        model: fingerprint of the model they were fitted to.
    """
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        for facet, found in (("key", layer.key), ("value", layer.value)):
            if found is not None:
                tensors[f"{i}.{facet}.matrix"] = found.matrix.cpu().contiguous()
                tensors[f"{i}.{facet}.rank"] = torch.tensor(found.rank)
    facts: dict[str, str | int] = {"layers": len(layers), "model": model}
    facts["sha256"] = _checksum(tensors, facts)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    beside.write_bytes(to_bytes(tensors, {FORMAT: json.dumps(facts)}))
    beside.replace(path)


def load(path: Path, model: str) -> tuple[LayerBasis, ...]:
    """Read the bases of all layers back.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or no file of bases, or belongs to another model.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; fit bases for the model and save them there"
        )
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    if text is None:
        raise ValueError(f"{path} holds no bases of the format {FORMAT!r}")
    try:
        facts = json.loads(text)
    except json.JSONDecodeError:
        facts = {}
    if facts.pop("sha256", None) != _checksum(tensors, facts):
        raise ValueError(f"{path} is damaged: its checksum does not fit; fit and save it again")
    if facts["model"] != model:
        raise ValueError(f"{path} was fitted to the model {facts['model']}, not to {model}")
    return tuple(
        LayerBasis(_found(tensors, f"{i}.key"), _found(tensors, f"{i}.value"))
        for i in range(facts["layers"])
    )


def _found(tensors: dict[str, Tensor], name: str) -> HeadBasis | None:
    if f"{name}.matrix" not in tensors:
        return None
    return HeadBasis(tensors[f"{name}.matrix"], tuple(tensors[f"{name}.rank"].tolist()))


def _checksum(tensors: dict[str, Tensor], facts: dict[str, str | int]) -> str:
    known = repr(sorted(facts.items())).encode()
    return hashlib.sha256(to_bytes(tensors) + known).hexdigest()
