"""What calibration found out about a model, as a file that the policies of this package read."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from kv_svd.fit import Moments
from kv_svd.io import read, read_facts, write
from kv_svd.statistics import LayerStatistics, Statistics

FORMAT: Final = "kv-svd statistics 1"
_PARTS: Final = ("query", "key", "value", "output")

Count = Annotated[int, Meta(ge=1)]


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of a file of statistics: which model, which text, which sizes."""

    model: str  # its name, for people
    fingerprint: str  # of its weights, settings and tokenizer
    text: str  # name of the text that was read
    digest: str  # of that text
    tokens: Count
    layers: Count
    heads: Count  # KV heads of a layer
    group: Count  # query heads of a KV head
    key_dim: Count
    value_dim: Count
    output_rows: Count  # rows behind the moments of the output projection, per KV head
    together: Count  # KV heads side by side in the moments of keys and values
    rate: Annotated[float, Meta(ge=0, lt=1)] | None = None  # what a search found for `zack`
    max_loss: float | None = None  # the loss that was allowed in it
    tasks: tuple[str, ...] = ()  # those it was allowed on


def save(path: Path, facts: Facts, statistics: Statistics) -> None:
    """Write statistics whole or not at all.

    Raises:
        ValueError: the facts tell other sizes than the statistics have.
    """
    _check(facts, statistics, path)
    tensors = {
        name: torch.stack([getattr(layer, name).total for layer in statistics]) for name in _PARTS
    }
    tensors |= {"singular.key": statistics.key, "singular.value": statistics.value}
    write(path, FORMAT, msgspec.json.encode(facts).decode(), tensors)


def load_facts(path: Path) -> Facts:
    """Read the head of a file; quick, and quicker the second time.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or no file of statistics.
    """
    return _facts(stamp(path))


def load(path: Path) -> tuple[Facts, Statistics]:
    """Read a file; of the last two that were read, a file that did not change is read once.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or no file of statistics.
    """
    return _load(stamp(path))


class Stamp(NamedTuple):
    """What changes when a file does."""

    path: Path
    changed: int  # ns
    size: int  # bytes
    inode: int  # another one where the file was replaced


def stamp(path: Path) -> Stamp:
    """Look at a file without reading it; of one that is missing, reading says so."""
    path = Path(os.path.abspath(path))
    try:
        found = path.stat()
    except OSError:
        return Stamp(path, 0, 0, 0)
    return Stamp(path, found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=32)
def _facts(file: Stamp) -> Facts:
    return _decode(file.path, read_facts(file.path, FORMAT))


@lru_cache(maxsize=2)
def _load(file: Stamp) -> tuple[Facts, Statistics]:
    path = file.path
    text, tensors = read(path, FORMAT)
    facts = _decode(path, text)
    try:
        statistics = _statistics(facts, tensors)
    except (KeyError, IndexError) as error:
        raise ValueError(f"{path} lacks what it tells of: {error}; calibrate again") from None
    _check(facts, statistics, path)
    return facts, statistics


def _decode(path: Path, text: str) -> Facts:
    try:
        return msgspec.json.decode(text, type=Facts)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} does not tell what it holds: {error}; calibrate again") from None


def _statistics(facts: Facts, tensors: dict[str, Tensor]) -> Statistics:
    rows = _rows(facts)
    layers = tuple(
        LayerStatistics(
            *(Moments(total, rows[name]) for name, total in zip(_PARTS, each, strict=True))
        )
        for each in zip(*(tensors[name] for name in _PARTS), strict=True)
    )
    return Statistics(layers, tensors["singular.key"], tensors["singular.value"])


def _rows(facts: Facts) -> dict[str, int]:
    """Rows behind the moments of a head, by their name."""
    return {
        "query": facts.tokens * facts.group,
        "key": facts.tokens,
        "value": facts.tokens,
        "output": facts.output_rows,
    }


def _check(facts: Facts, statistics: Statistics, path: Path) -> None:
    """Refuse facts that tell other sizes than the statistics have."""
    heads, joined = facts.heads, facts.heads // facts.together
    key, value = facts.key_dim, facts.value_dim
    sizes = {
        "query": (heads, key),
        "key": (joined, key * facts.together),
        "value": (joined, value * facts.together),
        "output": (heads, value),
    }
    rows = _rows(facts)
    right = len(statistics.layers) == facts.layers and all(
        tuple(moments.total.shape) == (count, dim, dim) and moments.rows == rows[name]
        for layer in statistics
        for name, (count, dim) in sizes.items()
        for moments in (getattr(layer, name),)
    )
    spectra = ((statistics.key, key), (statistics.value, value))
    right &= all(tuple(each.shape) == (facts.layers, heads, dim) for each, dim in spectra)
    right &= heads % facts.together == 0 and facts.output_rows % facts.group == 0
    if not right:
        raise ValueError(
            f"{path}: statistics of {statistics.tokens} tokens do not have the sizes that are told "
            f"of them: {facts}"
        )
