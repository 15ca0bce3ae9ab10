"""Models in folders, and incomplete folders."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kv_transformers.models import load_model
from kv_transformers.models.folder import fingerprint
from model_files import flip, refusal


def test_folder_loads_in_every_dtype(tiny_folder: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    for dtype, expected in {"auto": torch.bfloat16, "float32": torch.float32}.items():
        loaded = load_model(str(tiny_folder), dtype, "cpu")
        assert loaded.model.dtype == expected
        assert not loaded.model.training
        assert loaded.name == str(tiny_folder)
    assert load_model(str(tiny_folder), torch.float16).model.dtype == torch.float16
    assert logging.get_verbosity() == before


def test_fingerprint_tells_models_apart(tiny_folder: Path, tmp_path: Path) -> None:
    same = Path(shutil.copytree(tiny_folder, tmp_path / "same"))
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert fingerprint(same) == fingerprint(tiny_folder)
    (same / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert fingerprint(same) != fingerprint(tiny_folder)
    other = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    flip(other / "model.safetensors")
    assert fingerprint(other) != fingerprint(tiny_folder)


def drop_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def name_weights(weights: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))

    return change


def set_config(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_bytes(data)


FAULTS = {
    "deep config": (set_config(b'{"a":' * 100_000), "config.json is damaged"),
    "deep but closed": (set_config(b'{"a":' * 5000 + b"1" + b"}" * 5000), "config.json is"),
    "config of bytes": (set_config(b'{"a": "\xff"}'), "config.json is damaged"),
    "a number of digits": (set_config(b'{"a": ' + b"1" * 9999 + b"}"), "config.json is damaged"),
    "a null map": (name_weights(None), "its weight_map is not an object"),
    "a map of numbers": (name_weights({"a": 1}), "it names the file '1', which is not in"),
    "a map to elsewhere": (name_weights({"a": "../x"}), "it names the file '../x', which is not"),
    "an endless name": (name_weights({"a": "x" * 9999}), "which is not in its folder"),
    "a list of names": (name_weights(["a"]), "its weight_map is not an object"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "unknown kind": (
        lambda f: (f / "config.json").write_text('{"model_type": "abacus"}'),
        "cannot be loaded as a causal language model",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors"),
    "weights cut short": (
        lambda f: os.truncate(f / "model.safetensors", 5000),
        "model.safetensors is damaged",
    ),
    "a shard missing": (lose_a_shard, "model-2.safetensors is missing"),
    "a weight missing": (drop_a_weight, "lacks 1 of the model's weights"),
    "no tokenizer": (
        lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_folder(tiny_folder: Path, fault: str) -> None:
    harm, words = FAULTS[fault]
    harm(tiny_folder)
    assert words in refusal(str(tiny_folder))


def test_unknown_dtype_and_device(tiny_folder: Path) -> None:
    assert "choose one of auto, bfloat16" in refusal(str(tiny_folder), dtype="int3")
    assert "device='abacus' is not usable" in refusal(str(tiny_folder), device="abacus")
