"""Detect the rotary embedding of each layer by running a few tokens through the model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from kv_policy import CacheShape, KVPolicy, Rope, Ropes, complete
from kv_transformers.cache_argument import passing
from kv_transformers.support import UnsupportedModelError
from kv_transformers.watching import WatchingCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS: Final = 5
POSITIONS: Final = (0, 1, 13, 101, 1009)  # distinguish frequencies from 1 to 0.0001
FAR: Final = 2047  # the last position, if the config defines none
NEAR: Final = 1e-3  # relative to a query's norm; a wrong rotation differs by far more
NEAR_IN_16_BITS: Final = 0.02  # tolerance for 16-bit rounding of the model's own rotation
_GROWING: Final = ("dynamic", "longrope")  # kinds whose frequencies depend on the sequence length


def with_ropes(model: "PreTrainedModel", shape: CacheShape, policy: KVPolicy) -> CacheShape:
    """Add each layer's rotary embedding to a shape, if the policy needs it.

    The model runs a few single tokens at several positions. A single token attends only to itself
    at any position, so its queries in each layer differ only by the rotation.

    Raises:
        UnsupportedModelError: a layer applies something else, or frequencies depend on the
            sequence length; the message names the layer.
    """
    if policy.selector is None:
        return shape
    selector = complete(policy.selector)
    if not selector.needs_rope or (policy.basis is not None and not selector.scores_once):
        return shape
    return replace(shape, rope=find_ropes(model, shape, str(policy)))


def find_ropes(model: "PreTrainedModel", shape: CacheShape, reader: str) -> Rope | Ropes:
    """Return the rotary embedding of each layer, or of all.

    Args:
        model: the model.
        shape: the shape of its cache.
        reader: what needs it, for error messages.

    Raises:
        UnsupportedModelError: as `with_ropes`.
    """
    name = type(model).__name__
    for kind in _kinds(model):
        if kind in _GROWING:
            raise UnsupportedModelError(
                f"{reader} rotates vectors to other positions, but the rotary embedding of {name} "
                f"({kind}) changes with the length of the sequence; use a policy that "
                "needs no rotation, such as snapkv"
            )
    config = model.config.get_text_config(decoder=True)
    last = (getattr(config, "max_position_embeddings", None) or FAR + 1) - 1
    near = NEAR if model.dtype.itemsize >= 4 else NEAR_IN_16_BITS
    places = [*(p for p in POSITIONS if p < last), last]
    query = _queries(model, shape, places)  # N T P H D
    start = query[:, :, :1]
    size = vector_norm(start, dim=(1, 2, 3, 4)).clamp(min=torch.finfo(torch.float32).tiny)
    position = torch.tensor(places[:-1], device=query.device)[:, None]
    best: list[tuple[float, Rope | None]] = [(near, None)] * shape.layers
    for rope in _candidates(model, shape.key_dim):
        off = rope.turned(start, position) - query[:, :, :-1]
        error = vector_norm(off, dim=(1, 3, 4)).amax(1) / size
        best = [
            (each, rope) if each < least else (least, found)
            for each, (least, found) in zip(error.tolist(), best, strict=True)
        ]
    # At large positions the angle is too inexact to compare, but a rotation preserves norms.
    norm = vector_norm(query, dim=-1)
    grown = (norm / norm[:, :, :1] - 1).abs().nan_to_num(0).amax((1, 2, 3)).tolist()
    ropes = [
        None if off > NEAR_IN_16_BITS else rope for off, (_, rope) in zip(grown, best, strict=True)
    ]
    missing = [layer for layer, rope in enumerate(ropes) if rope is None]
    if missing:
        raise UnsupportedModelError(
            f"{reader} rotates vectors to other positions, but layer {missing[0]} of {name} "
            "changes them with their position in a way that is not a supported rotary embedding "
            "(halves or interleaved pairs rotated by the model's inv_freq, or none); use a policy "
            "that needs no rotation, such as snapkv"
        )
    known = tuple(rope for rope in ropes if rope is not None)
    return known[0] if len(set(known)) == 1 else Ropes(known)


def _kinds(model: "PreTrainedModel") -> Iterator[str]:
    """Yield transformers' types of the rotary embeddings of a model."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        yield from map(str, kind.values() if isinstance(kind, dict) else (kind,))


def _queries(
    model: "PreTrainedModel", shape: CacheShape, places: list[int]
) -> Float[Tensor, "N T P H D"]:
    """Return the queries of a few single tokens at these positions."""

    def show(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        found[layer] = query[:, :, 0].float()

    found: dict[int, Tensor] = {}
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(TOKENS, device=model.device) * 7 + 3) % vocabulary
    position = torch.tensor(places, device=model.device).repeat(TOKENS)
    rows = ids.repeat_interleave(len(places))[:, None]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            model(
                rows,
                attention_mask=torch.ones_like(rows),
                position_ids=position[:, None],
                **passing(model, WatchingCache(model, show)),
            )
    finally:
        for module in training:
            module.training = True
    each = torch.stack([found[layer] for layer in range(shape.layers)])
    by_token: Tensor = each.unflatten(1, (TOKENS, len(places)))
    return by_token


def _candidates(model: "PreTrainedModel", dim: int) -> Iterator[Rope]:
    """Yield candidate rotations of a layer: none, or the model's frequencies on some dimensions."""
    yield Rope((), ())
    seen: set[tuple[float, ...]] = set()
    for name, buffer in model.named_buffers():
        if not name.endswith("inv_freq") or "original" in name or buffer.ndim != 1:
            continue
        frequencies = tuple(buffer.double().tolist())
        count = len(frequencies)
        if frequencies in seen or 2 * count > dim:
            continue
        seen.add(frequencies)
        for first in dict.fromkeys((0, dim - 2 * count)):
            halves = tuple((first + i, first + count + i) for i in range(count))
            neighbours = tuple((first + 2 * i, first + 2 * i + 1) for i in range(count))
            for pairs in (halves, neighbours):
                yield Rope(frequencies, pairs)
                yield Rope(frequencies, tuple((j, i) for i, j in pairs))
