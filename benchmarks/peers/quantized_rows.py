"""Rows of transformers' QuantizedCache, as the pinned release has it.

Two backends at the bits they offer, groups of 64 elements, which are a head's vector here, and the
newest 128 generated tokens raw: what transformers does by itself. With `keys=channel` a group is 64
tokens of a channel of the keys, as in KIVI, which is quanto's axis -1. The documents of hqq advise
axis 1, at which its 3 bits fail on a cache, so those are at axis 0. Its 4 and 2 bits fail at
lengths that do not pack, as do groups along tokens, so the last tokens of such a prompt come after
the rest, and stay raw.

quanto compiles a part of itself at its first use, which takes minutes. If that is interrupted, a
file `lock` stays in its folder `extensions/cpp/build`, and later runs wait for ever: delete it.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _asking import Reading, clock, load, passed, run
from _work import FULL, Work, put, rows_out, versions
from torch import Tensor
from transformers import DynamicCache, QuantizedCache

PACKED = {"hqq4": 4, "hqq2": 4}  # tokens that hqq packs together
CHANNEL = ":keys=channel"
GROUP = 64  # tokens of a channel that share a scale


def made(model: Any, way: str) -> Any:
    """Make an empty cache."""
    if way == FULL:
        return DynamicCache(config=model.config)
    match = re.fullmatch(r"(quanto|hqq)(\d)(:keys=channel)?", way)
    assert match is not None
    axis = 1 if way in PACKED else 0
    key, bits = -1 if match[3] else axis, int(match[2])
    return QuantizedCache(match[1], model.config, nbits=bits, axis_key=key, axis_value=axis)


def packing(way: str, length: int) -> int:
    """Tokens of a prompt that are quantized at once."""
    together = GROUP if way.endswith(CHANNEL) else PACKED.get(way, 1)
    return length // together * together


def begun(model: Any, way: str, prompt: Tensor) -> Reading:
    """Let a cache read a prompt as transformers does."""
    cache, first = made(model, way), packing(way, prompt.shape[1])
    passed(model, cache, prompt[:, :first], 0)
    if first < prompt.shape[1]:
        passed(model, cache, prompt[:, first:], first)
    return Reading(cache)


def filled(model: Any, way: str, full: Any, prompt: Tensor) -> Reading:
    """Give a cache the keys and values of a pass that the full cache made.

    A quantized cache attends to a prompt before it quantizes it, so its own pass would be the same.
    """
    cache, first = made(model, way), packing(way, prompt.shape[1])
    for i, layer in enumerate(full.layers):
        cache.update(layer.keys[:, :, :first], layer.values[:, :, :first], i)
    if first < prompt.shape[1]:
        passed(model, cache, prompt[:, first:], first)
    return Reading(cache)


def main() -> None:
    """Print the rows that are asked for."""
    out, work = rows_out(), Work.read(Path(sys.argv[1]))
    put(out, versions(("hqq", "optimum-quanto", "torch", "transformers")))
    model = load(work.model)

    def read(ways: Sequence[str], prompt: Tensor) -> Mapping[str, Reading | Exception]:
        full = begun(model, FULL, prompt)
        found: dict[str, Reading | Exception] = {FULL: full}
        for way in ways:
            if way != FULL:
                try:
                    found[way] = filled(model, way, full.cache, prompt)
                except Exception as error:  # a backend that fails says so in its rows
                    found[way] = error
        return found

    if work.rounds:
        clock(model, work, partial(begun, model), out)
    else:
        run(model, work, read, out)


if __name__ == "__main__":
    main()
