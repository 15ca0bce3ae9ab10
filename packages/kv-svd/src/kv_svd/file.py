"""The file of calibration statistics that the policies of this package read."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from kv_policy.decoding import decode
from kv_policy.tensor_files import Stamp, read, read_facts, stamp, write
from kv_svd.fit import Moments
from kv_svd.statistics import LayerStatistics, Statistics

FORMAT: Final = "kv-svd statistics 1"
CALIBRATION: Final = "zack"
_PARTS: Final = ("query", "key", "value", "output")
_SUM: Final = "key.sum"  # missing in files of earlier versions

Count = Annotated[int, Meta(ge=1)]


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a statistics file: model, text and sizes."""

    model: str  # display name
    fingerprint: str  # of its weights, settings and tokenizer
    text: str  # name of the calibration text
    digest: str  # of that text
    tokens: Count
    layers: Count
    heads: Count  # KV heads per layer
    group: Count  # query heads per KV head
    key_dim: Count
    value_dim: Count
    output_rows: Count  # rows behind the moments of the output projection, per KV head
    together: Count  # KV heads concatenated in the moments of keys and values
    rate: Annotated[float, Meta(ge=0, lt=1)] | None = None  # found by a search for `zack`
    max_loss: float | None = None  # the allowed loss of the search
    tasks: tuple[str, ...] = ()  # the tasks the loss was measured on


def save(path: Path, facts: Facts, statistics: Statistics) -> None:
    """Write statistics atomically.

    Raises:
        ValueError: the sizes in the facts differ from those of the statistics.
    """
    tensors = {
        name: torch.stack([getattr(layer, name).total for layer in statistics]) for name in _PARTS
    }
    tensors |= {"singular.key": statistics.key, "singular.value": statistics.value}
    sums = [layer.key_sum for layer in statistics if layer.key_sum is not None]
    if sums:
        tensors[_SUM] = torch.stack(sums)
    _check(facts, statistics, tensors, path)
    write(path, FORMAT, msgspec.json.encode(facts).decode(), tensors)


def load_facts(path: Path) -> Facts:
    """Load the header of a file; cached.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or is not a statistics file.
    """
    return _facts(stamp(path))


def load(path: Path) -> tuple[Facts, Statistics]:
    """Load a file; the last two files are cached until they change.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or is not a statistics file.
    """
    return _load(stamp(path))


@lru_cache(maxsize=32)
def _facts(file: Stamp) -> Facts:
    return _decode(file.path, read_facts(file.path, FORMAT, CALIBRATION))


@lru_cache(maxsize=2)
def _load(file: Stamp) -> tuple[Facts, Statistics]:
    path = file.path
    text, tensors = read(path, FORMAT, CALIBRATION)
    facts = _decode(path, text)
    for name, shape in _shapes(facts, path).items():
        found = tensors.get(name)
        if found is None and name == _SUM:
            continue
        if found is None or found.dtype != torch.float64 or tuple(found.shape) != shape:
            had = "none" if found is None else f"{found.dtype} of {tuple(found.shape)}"
            raise ValueError(
                f"{path}: statistics do not match the sizes in the header: {name} should be "
                f"float64 of {shape}, found {had}; calibrate again"
            )
        if not found.isfinite().all():
            raise ValueError(f"{path}: {name} contains an infinity or NaN; calibrate again")
    return facts, _statistics(facts, tensors)


def _decode(path: Path, text: str) -> Facts:
    try:
        return decode(text, Facts)
    except ValueError as error:
        raise ValueError(f"{path} has an invalid header: {error}; calibrate again") from None


def _statistics(facts: Facts, tensors: dict[str, Tensor]) -> Statistics:
    rows = _rows(facts)
    sums = tensors[_SUM] if _SUM in tensors else [None] * facts.layers
    layers = []
    for i in range(facts.layers):
        query, key, value, output = (Moments(tensors[name][i], rows[name]) for name in _PARTS)
        layers.append(LayerStatistics(query, key, value, output, sums[i]))
    return Statistics(tuple(layers), tensors["singular.key"], tensors["singular.value"])


def _rows(facts: Facts) -> dict[str, int]:
    """Return the rows behind the moments of a head, by name."""
    return {
        "query": facts.tokens * facts.group,
        "key": facts.tokens,
        "value": facts.tokens,
        "output": facts.output_rows,
    }


def _shapes(facts: Facts, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes that the facts imply.

    Raises:
        ValueError: the facts contradict each other.
    """
    if facts.heads % facts.together or facts.output_rows % facts.group:
        raise ValueError(
            f"{path}: statistics do not match the sizes in the header: {facts.heads} KV "
            f"heads, {facts.together} together, with {facts.output_rows} output rows for a group "
            f"of {facts.group}; calibrate again"
        )
    layers, heads, joined = facts.layers, facts.heads, facts.heads // facts.together
    key, value = facts.key_dim, facts.value_dim
    return {
        "query": (layers, heads, key, key),
        "key": (layers, joined, key * facts.together, key * facts.together),
        "value": (layers, joined, value * facts.together, value * facts.together),
        "output": (layers, heads, value, value),
        "singular.key": (layers, heads, key),
        "singular.value": (layers, heads, value),
        _SUM: (layers, heads, key),
    }


def _check(facts: Facts, statistics: Statistics, tensors: dict[str, Tensor], path: Path) -> None:
    """Raise if the sizes in the facts differ from those of the statistics."""
    rows = _rows(facts)
    wanted = _shapes(facts, path)
    right = {_SUM: wanted[_SUM]} | {name: tuple(t.shape) for name, t in tensors.items()} == wanted
    right &= all(getattr(layer, name).rows == rows[name] for layer in statistics for name in _PARTS)
    if not right:
        raise ValueError(
            f"{path}: statistics of {statistics.tokens} tokens do not match the sizes in the "
            f"header: {facts}"
        )
