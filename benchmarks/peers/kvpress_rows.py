"""Rows of kvpress, as the pinned release has it; methods are as it ships them.

Every press works on a pass over the prompt after each layer, so one pass is read for many presses:
a hook gives each press's own hook the layer's fresh keys and values in a cache of its own. KVzip
makes passes of its own, which do not depend on how much is kept; its last step, which does, is
called once for each share.

What kvpress masks in place of letting it go stays in the cache; the masks lie in the model's
modules, and count as held. PyramidKV and presses that mask read a question token by token: the
first leaves layers of different lengths, for which transformers makes one mask, and the others look
for one key that all queries of a pass ignore.
"""

import copy
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import kvpress
from _asking import Reading, clock, load, passed, run
from _work import FULL, Work, put, rows_out, versions
from torch import Tensor
from transformers import DynamicCache, QuantizedCache

Masks = list[Any]  # of each layer: indices of what is hidden, or None
Found = dict[str, Reading | Exception]
KVZIP = "kvzip"
STEPWISE = ("pyramidkv", "adakv", KVZIP)


@dataclass
class Shares(kvpress.KVzipPress):
    """KVzip for several shares, with the passes of one."""

    shares: tuple[float, ...] = ()  # that are kept
    masks: dict[float, Masks] = field(default_factory=dict)

    def compress_post(self, model: Any) -> None:
        """Choose what is hidden, for each share."""
        for kept in self.shares:
            self.compression_ratio = 1 - kept
            super().compress_post(model)
            self.masks[kept] = masks_of(model)


def press(name: str, kept: float) -> Any:
    """Make the press of a method.

    Raises:
        ValueError: no method has this name.
    """
    gone = 1 - kept
    match name:
        case "streaming-llm":
            return kvpress.StreamingLLMPress(gone)
        case "snapkv":
            return kvpress.SnapKVPress(gone)
        case "snapkv-pool21":
            return kvpress.SnapKVPress(gone, kernel_size=21)
        case "pyramidkv":
            return kvpress.PyramidKVPress(gone)
        case "expected-attention":
            return kvpress.ExpectedAttentionPress(gone)
        case "tova":
            return kvpress.TOVAPress(gone)
        case "chunkkv":
            return kvpress.ChunkKVPress(kvpress.SnapKVPress(gone))
        case "adakv-expected-attention":
            return kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(gone, epsilon=1e-2))
        case "kvzip":
            return kvpress.KVzipPress(gone)
    raise ValueError(f"no press is named {name!r}")


def parts(way: str) -> tuple[str, float]:
    """The method and the share it keeps."""
    match = re.fullmatch(r"([\w-]+):keep=([\d.]+)(\+quanto4)?", way)
    assert match is not None
    return match[1], float(match[2])


def empty(model: Any, way: str) -> Any:
    """Make the empty cache that a way is used with."""
    if way.endswith("+quanto4"):
        return QuantizedCache("quanto", model.config, nbits=4)
    return DynamicCache(config=model.config)


def masks_of(model: Any) -> Masks:
    """What the modules hide now."""
    return [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]


def hide(model: Any, masks: Masks) -> None:
    """Let the modules hide this."""
    for layer, mask in zip(model.model.layers, masks, strict=True):
        layer.self_attn.masked_key_indices = mask


def reading(model: Any, way: str, cache: Any, masks: Masks) -> Reading:
    """A cache, with what the modules have to hide while it is read."""
    beside = tuple(index for mask in masks if mask is not None for index in mask)
    stepwise = way.startswith(STEPWISE)
    return Reading(cache, beside, prepare=partial(hide, model, masks), stepwise=stepwise)


def whole(model: Any, prompt: Tensor) -> Reading:
    """Read a prompt into the full cache."""
    cache = empty(model, FULL)
    passed(model, cache, prompt, 0)
    return reading(model, FULL, cache, [None] * len(model.model.layers))


@contextmanager
def watched(
    model: Any, presses: Mapping[str, Any], caches: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Masks], dict[str, Exception]]]:
    """Let all presses see the pass that follows; one that fails is left out from then on."""
    masks: dict[str, Masks] = {way: [] for way in presses}
    failed: dict[str, Exception] = {}

    def hook(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        fresh = named["past_key_values"].layers[module.layer_idx]
        for way, work in presses.items():
            if way in failed:
                continue
            module.masked_key_indices = None
            try:
                caches[way].update(fresh.keys, fresh.values, module.layer_idx)
                work.forward_hook(module, given, named | {"past_key_values": caches[way]}, output)
            except Exception as error:  # said in the rows of the way
                failed[way] = error
            masks[way].append(module.masked_key_indices)
        module.masked_key_indices = None

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # a press gives it to them, too
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    try:
        yield masks, failed
    finally:
        for each in hooks:
            each.remove()


def pressed(model: Any, ways: Sequence[str], prompt: Tensor) -> Found:
    """Read a prompt once for all presses that work in one pass, and for the full cache."""
    chosen = [way for way in ways if way != FULL]
    presses = {way: press(*parts(way)) for way in chosen}
    caches = {way: empty(model, way) for way in chosen}
    with watched(model, presses, caches) as (masks, failed):
        full = whole(model, prompt)
    found: Found = {
        way: failed[way] if way in failed else reading(model, way, caches[way], masks[way])
        for way in chosen
    }
    return {FULL: full} | found


def zipped(model: Any, ways: Sequence[str], prompt: Tensor) -> Found:
    """Let KVzip read a prompt, once for all shares, which get the same keys and values."""
    shares = tuple(parts(way)[1] for way in ways)
    cache, work = empty(model, FULL), Shares(1 - shares[0], shares=shares)
    try:
        with work(model):
            passed(model, cache, prompt, 0)
    except Exception as error:  # said in the rows of the ways
        return dict.fromkeys(ways, error)
    return {
        way: reading(model, way, copied(cache), work.masks[kept])
        for way, kept in zip(ways, shares, strict=True)
    }


def copied(cache: Any) -> Any:
    """A cache of the same tensors; what it takes in does not change this one."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    return made


def begun(model: Any, way: str, prompt: Tensor) -> Reading:
    """Read a prompt as kvpress does it for one press."""
    if way == FULL:
        return whole(model, prompt)
    cache = empty(model, way)
    with press(*parts(way))(model):
        passed(model, cache, prompt, 0)
    return reading(model, way, cache, masks_of(model))


def main() -> None:
    """Print the rows that are asked for."""
    out, work = rows_out(), Work.read(Path(sys.argv[1]))
    put(out, versions(("kvpress", "optimum-quanto", "torch", "transformers")))
    model = load(work.model)

    def read(ways: Sequence[str], prompt: Tensor) -> Found:
        zips = [way for way in ways if way.startswith(KVZIP)]
        rest = [way for way in ways if way not in zips]
        found = pressed(model, rest, prompt) if rest else {}
        return found | (zipped(model, zips, prompt) if zips else {})

    if work.rounds:
        clock(model, work, partial(begun, model), out)
    else:
        run(model, work, read, out)


if __name__ == "__main__":
    main()
