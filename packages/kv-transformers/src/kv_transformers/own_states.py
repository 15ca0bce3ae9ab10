"""What transformers' own cache layers hold, as tensors by name, and layers that continue from it.

A sliding window holds its keys and values, and a layer with states (Mamba, linear attention,
convolutions) those of fixed size. How many columns were seen is known from the cache.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor

from kv_transformers.layers import cache_bytes

PREFIX: Final = "own."
_NAME: Final = re.compile(r"own\.(\d{1,4})\.(key|value|conv\.\d{1,2}|state\.\d{1,2})")


def own_tensors(layers: Sequence[Any]) -> dict[str, Tensor]:
    """Copy to the CPU what transformers' cache layers hold; `own.3.key` is of the fourth layer.

    Raises:
        ValueError: a layer is of a kind that is not saved, or keeps tokens to be taken back.
    """
    found: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        mine = dict(_held(layer))
        if cache_bytes([layer]) and (not mine or layer.record_past):
            raise ValueError(
                f"a layer of this model keeps a cache of transformers ({type(layer).__name__}) "
                "that is not saved: the keys of an indexer, or tokens recorded to be taken back; "
                "use another model, or a cache without assisted generation"
            )
        for name, x in mine.items():
            copy = x.to("cpu", copy=True, memory_format=torch.contiguous_format)
            found[f"{PREFIX}{i}.{name}"] = copy
    return found


def restore_own(
    layers: Sequence[Any],
    tensors: Mapping[str, Tensor],
    held: Bool[Tensor, "B T"],
    device: torch.device,
) -> None:
    """Let empty cache layers continue from `own_tensors` of others; the file may be untrusted.

    Args:
        layers: of a new cache.
        tensors: as `own_tensors` returns them.
        held: which columns of the cache hold a token.
        device: of the model.

    Raises:
        ValueError: tensors are missing, left over, or of another shape; layers may have changed.
    """
    each: list[dict[str, Tensor]] = [{} for _ in layers]
    sequences, columns = held.shape
    for name, x in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) >= len(layers):
            raise ValueError(f"{name[:100]!r} is of no layer that this model has")
        if not x.is_floating_point() or x.ndim < 2 or len(x) != sequences:
            raise ValueError(f"{name} should be floats of {sequences} sequences")
        each[int(match[1])][match[2]] = x
    for i, (layer, mine) in enumerate(zip(layers, each, strict=True)):
        left = {name: x.to(device) for name, x in mine.items()}
        try:
            _restore(layer, left, columns)
        except ValueError as error:
            raise ValueError(f"{PREFIX}{i} {error}") from None


def _held(layer: Any) -> Iterator[tuple[str, Tensor]]:
    from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        for name, x in (("key", layer.keys), ("value", layer.values)):
            if x is not None:
                yield name, x
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind, states in (("conv", layer.conv_states), ("state", layer.recurrent_states)):
            yield from ((f"{kind}.{s}", x) for s, x in states.items() if x is not None)


def _restore(layer: Any, given: dict[str, Tensor], columns: int) -> None:
    """Fill a layer.

    Raises:
        ValueError: `given` is not what such a layer keeps.
    """
    from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

    if isinstance(layer, DynamicSlidingWindowLayer):
        key, value = given.pop("key", None), given.pop("value", None)
        length = min(columns, layer.sliding_window - 1)
        if key is None or value is None:
            raise ValueError("lacks keys or values of its window")
        if key.ndim != 4 or key.shape[:3] != value.shape[:3] or key.shape[2] != length:
            raise ValueError(f"should have keys and values of {length} tokens")
        layer.update(key, value)
        layer.cumulative_length = columns
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in sorted(given):
            kind, _, number = name.partition(".")
            state = int(number) if number else -1
            if state not in layer.conv_states:
                raise ValueError(f"has no {name}")
            fill = layer.update_conv_state if kind == "conv" else layer.update_recurrent_state
            fill(given.pop(name), state_idx=state)
            layer.has_previous_state[state] = True
    if given:
        raise ValueError(f"has {sorted(given)}, which this model does not keep")
