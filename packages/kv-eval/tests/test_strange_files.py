"""Files that a stranger wrote: whatever is in them, a loader reads them or says what is wrong."""

import hashlib
import json
import random
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from damaged import mutated
from kv_eval.report.page import page
from kv_eval.report.read import ReadError, read
from kv_transformers.models import ModelError
from kv_transformers.models.convert import FORMAT, MANIFEST, damage
from kv_transformers.models.folder import fingerprint
from result_files import report, row

STRANGE = (
    *(None, True, 0, -1, 3, 0.5, 1e300, 5e-324, 2**70, "", "\0", "<b>&", "../x", "x" * 3000),
    *([], {}, [[]], [0], [1.0, 2.0, 3.0], {"a": 1}),
)


def places(value: object) -> list[tuple[dict | list, object]]:
    """Every place in a value of JSON where another could stand."""
    if not isinstance(value, dict | list):
        return []
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    return [(value, k) for k in keys] + [each for k in keys for each in places(value[k])]


def changed(data: bytes, chance: random.Random) -> bytes:
    """The same JSON with some values that mean something else, or are gone; or other bytes."""
    if chance.random() < 0.4:
        return mutated(data, chance)
    value = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        where, key = chance.choice(places(value) or [([None], 0)])
        if chance.random() < 0.2:
            del where[key]
        else:
            where[key] = deepcopy(chance.choice(STRANGE))
    return json.dumps(value).encode()


def weights(path: Path) -> None:
    save_file({"a": torch.zeros(3)}, path)


def result(folder: Path) -> tuple[Path, Callable[[], object]]:
    kept = {"k8v4": ((1.0, 2.0), (3.0, 4.0))}
    spectra = {"x": (((1.0, 0.5), (1.0, 0.25)), ((1.0, 0.5), (1.0, 0.25)))}
    path = folder / "a.json"
    report(row("full", 1, 1000), row("k8v4", 0.9, 400), kept=kept, spectra=spectra).write(path)
    return path, lambda: page(read([path]))


def config(folder: Path) -> tuple[Path, Callable[[], object]]:
    weights(folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "rope": {"theta": 1e4}, "x": [1, [2]]}))
    return path, lambda: fingerprint(folder)


def index(folder: Path) -> tuple[Path, Callable[[], object]]:
    weights(folder / "model-1.safetensors")
    (folder / "config.json").write_text("{}")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}))
    return path, lambda: fingerprint(folder)


def header(folder: Path) -> tuple[Path, Callable[[], object]]:
    weights(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder / "model.safetensors", lambda: fingerprint(folder)


def manifest(folder: Path) -> tuple[Path, Callable[[], object]]:
    made = folder / "tiny-0123456789abcdef"
    made.mkdir()
    weights(made / "model.safetensors")
    (made / "config.json").write_text("{}")
    files = {
        path.name: {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in made.iterdir()
    }
    whole = {"format": FORMAT, "source": "tiny.gguf", "size": 1, "files": files}
    path = made / MANIFEST
    path.write_text(json.dumps(whole | {"sha256": "0123456789abcdef" + "0" * 48}))
    return path, lambda: damage(made)


@pytest.mark.parametrize("kind", [result, config, index, header, manifest])
def test_no_bytes_end_in_another_error(
    tmp_path: Path, kind: Callable[[Path], tuple[Path, Callable[[], object]]]
) -> None:
    path, load = kind(tmp_path)
    whole, chance = path.read_bytes(), random.Random(0)
    assert load() if kind is not manifest else load() is None
    for _ in range(250):
        path.write_bytes(mutated(whole, chance) if kind is header else changed(whole, chance))
        with suppress(ModelError, ReadError):
            load()
