"""Detect the rotary embedding of each layer by running a few tokens through the model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor

from kv_policy import CacheShape, KVPolicy, Rope, Ropes
from kv_runtime import (
    find_rope,
    growing_kind,
    joined_ropes,
    model_frequencies,
    needs_rotation,
    probe_positions,
)
from kv_transformers.cache_argument import passing
from kv_transformers.support import UnsupportedModelError
from kv_transformers.watching import WatchingCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS: Final = 5
FAR: Final = 2047  # the last position, if the config defines none


def with_ropes(model: "PreTrainedModel", shape: CacheShape, policy: KVPolicy) -> CacheShape:
    """Add each layer's rotary embedding to a shape, if the policy needs it.

    The model runs a few single tokens at several positions. A single token attends only to itself
    at any position, so its queries in each layer differ only by the rotation.

    Raises:
        UnsupportedModelError: a layer applies something else, or frequencies depend on the
            sequence length; the message names the layer.
    """
    return (
        replace(shape, rope=find_ropes(model, shape, str(policy)))
        if needs_rotation(policy)
        else shape
    )


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
    if kind := growing_kind(model):
        raise UnsupportedModelError(
            f"{reader} rotates vectors to other positions, but the rotary embedding of {name} "
            f"({kind}) changes with the length of the sequence; use a policy that "
            "needs no rotation, such as snapkv"
        )
    ropes = _found(ref(model), model.dtype, shape, tuple(model_frequencies(model)))
    missing = [layer for layer, rope in enumerate(ropes) if rope is None]
    if missing:
        raise UnsupportedModelError(
            f"{reader} rotates vectors to other positions, but layer {missing[0]} of {name} "
            "changes them with their position in a way that is not a supported rotary embedding "
            "(halves or interleaved pairs rotated by the model's inv_freq, or none); use a policy "
            "that needs no rotation, such as snapkv"
        )
    return joined_ropes([rope for rope in ropes if rope is not None])


@lru_cache(maxsize=8)
def _found(
    of: "ref[PreTrainedModel]",
    dtype: torch.dtype,
    shape: CacheShape,
    frequencies: tuple[tuple[float, ...], ...],
) -> tuple[Rope | None, ...]:
    """Return what explains each layer's vectors; cached, as each cache of a model asks for it."""
    model = of()
    assert model is not None, "the caller holds it"
    config = model.config.get_text_config(decoder=True)
    last = (getattr(config, "max_position_embeddings", None) or FAR + 1) - 1
    positions = probe_positions(last)
    queries = _queries(model, shape, positions)  # N T P H D
    if not shape.value_in_key:
        return tuple(find_rope(each, positions, frequencies) for each in queries)
    return tuple(_of_latents(each, positions, frequencies, shape.value_dim) for each in queries)


def _of_latents(
    vectors: Float[Tensor, "T P H D"],
    positions: Sequence[int],
    frequencies: tuple[tuple[float, ...], ...],
    rank: int,
) -> Rope | None:
    """Return the rotation of latent attention, whose first `rank` dimensions have no positions.

    These may be much longer than the others, so each is looked at alone.
    """
    if find_rope(vectors[..., :rank], positions, ()) is None:
        return None
    rope = find_rope(vectors[..., rank:], positions, frequencies)
    if rope is None:
        return None
    pairs = rope.pairs_of(vectors.shape[-1] - rank)
    return Rope(rope.frequencies, tuple((rank + i, rank + j) for i, j in pairs))


def _queries(
    model: "PreTrainedModel", shape: CacheShape, places: Sequence[int]
) -> Float[Tensor, "N T P H D"]:
    """Return the queries of a few single tokens at these positions."""

    def show(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        found[layer] = query[:, :, 0]

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
