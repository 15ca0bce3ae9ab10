"""The attention function with which transformers attends over pages in place.

`update` of the cache returns the new keys with a mark; the function registered here sees the mark
and calls the cache's attention. A model is switched to it for passes over our caches only
(`kv_transformers.switch`). Unmarked keys, such as those of another thread's pass over another
cache, use the implementation that the model is configured for.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor

from kv_transformers.latents import Absorbed, absorbed
from kv_transformers.pass_columns import ALL, PassColumns, columns_of, reach_of
from kv_transformers.running import Attends, Running, current
from kv_transformers.softmax import Softmax

if TYPE_CHECKING:
    from torch import nn

PREFIX: Final = "kv_transformers|"  # of the implementation's name in a model's configuration

CHOSEN: Final = "indices"  # the option that has the tokens an indexer has selected
_READ: Final = ("eager", "sdpa")  # implementations whose masks models read

# Options of attention functions that paged attention does not support, with their descriptions.
UNSERVED: Final = {
    "sinks": "attention sinks that are not called s_aux",
    "sliding_window": "a sliding window",
    "position_bias": "a position bias",
    CHOSEN: "attention to selected tokens",
    "block_indices": "attention to selected blocks",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
}


# Options of mask functions of transformers, for a mask that is never left out.
_WHOLE: Final = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


class FreshKeys(Tensor):
    """New keys of a forward pass, returned by the cache for the attention function."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    cache: Attends
    layer: int
    tiles: int = 1  # how often the model has repeated the KV heads as a whole; they are here once

    @classmethod
    def mark(cls, key: Tensor, cache: Attends, layer: int) -> "FreshKeys":
        """Mark keys with their cache and layer."""
        marked = key.as_subclass(cls)
        marked.cache, marked.layer = cache, layer
        return marked

    def repeat(self, *sizes: Any) -> Tensor:
        """Note that the model repeats the KV heads as a whole for its query heads (JetMoe)."""
        if len(sizes) != 4 or sizes[0] != 1 or sizes[2:] != (1, 1) or self.tiles > 1:
            return super().repeat(*sizes)
        marked = FreshKeys.mark(self, self.cache, self.layer)
        marked.tiles = sizes[1]
        return marked


class PassMask(Tensor):
    """The replacement of a 4D mask in a pass over our cache: the batch's padding, [B, 1, 1, T].

    It has four dimensions, as transformers only passes on such masks if a model creates them
    outside of its decoder. Where layers select tokens, it is the model's own mask, which they read.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    held: Tensor | None  # which columns hold a token, [B, T]; None: all
    whole: bool  # whether it is the model's own
    # How far queries see, see `PassColumns`; None: the mask is plainly causal. It is found when a
    # layer of the cache attends, as models make masks for others, too (cross-attention).
    reach: Callable[[], Tensor | None] | None
    own: Callable[[], Any]  # makes the mask of the implementation that the model is configured for

    def __getitem__(self, at: Any) -> Tensor:
        """Return the mask itself, if it has no queries that a model could cut off (Gemma 4)."""
        return super().__getitem__(at) if self.whole else self


def switched(name: str | None) -> str:
    """Return the implementation for our caches in a model configured for `name`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    ours = f"{PREFIX}{name or ''}"
    if ours not in AttentionInterface._global_mapping:
        AttentionMaskInterface.register(ours, partial(_mask, name))
        AttentionInterface.register(ours, partial(_attention, name))
    return ours


def configured(name: str | None) -> str | None:
    """Return the implementation that a model is configured for, given the name for our caches."""
    if name is None or not name.startswith(PREFIX):
        return name
    return name.removeprefix(PREFIX) or None


def _mask(
    name: str | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """Return the batch's padding for our caches, or the mask of the configured implementation."""
    from transformers.masking_utils import causal_mask_function

    def own() -> Any:
        given = options if mask_function is None else {**options, "mask_function": mask_function}
        if running is not None and (running.cache.shares or running.cache.indexes):
            given = {**given, **_WHOLE}  # a model may cut off queries, or read the mask
        return _own_mask(
            name, batch_size, q_length, kv_length, *args, attention_mask=attention_mask, **given
        )

    running = current()
    # Another thread's pass, or a window or chunk of layers that transformers caches.
    if running is None or options.get("local_size") is not None:
        return own()
    reach = None
    if mask_function is None or mask_function is causal_mask_function:
        _expect_columns(attention_mask, q_length, kv_length)
        running.cache.expect_mask(attention_mask, q_length)
    else:

        @cache
        def reach() -> Tensor | None:
            given = {**options, "mask_function": mask_function, **_WHOLE}
            sizes = batch_size, q_length, kv_length
            whole = _own_mask("sdpa", *sizes, *args, attention_mask=attention_mask, **given)
            found = reach_of(whole, attention_mask)
            if found is not None:
                _expect_columns(attention_mask, q_length, kv_length)
                running.cache.expect_mask(attention_mask, q_length)
            return found

    if running.cache.indexes:
        found = own() if name in _READ else None
        if found is None:
            sizes = batch_size, q_length, kv_length
            found = _own_mask("sdpa", *sizes, *args, attention_mask=attention_mask, **options)
    elif attention_mask is not None:
        found = attention_mask[:, None, None]
    else:
        found = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    mask = found.as_subclass(PassMask)
    mask.held, mask.whole = attention_mask, running.cache.indexes
    mask.reach, mask.own = reach, own
    if mask.whole:
        running.mask = mask
    return mask


def _own_mask(name: str | None, *args: Any, **options: Any) -> Any:
    """Return the mask of an implementation of transformers; None if it has none."""
    from transformers import AttentionMaskInterface

    make = AttentionMaskInterface().get(name)
    return None if make is None else make(*args, **options)


def _expect_columns(mask: Tensor | None, fresh: int, columns: int) -> None:
    """Raise if the length of a 2D mask is not the number of columns of cache and pass."""
    if mask is not None and mask.shape[-1] != columns:
        raise ValueError(
            f"attention_mask has {mask.shape[-1]} columns instead of {columns}: "
            f"{columns - fresh} that the compressed cache has seen and {fresh} of this pass; pass "
            "a mask over all of them"
        )


def _attention(
    name: str | None,
    module: "nn.Module",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    inner = _absorbed(module, query, key, value)
    if inner is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = inner.query, inner.key, inner.value
    if not isinstance(key, FreshKeys):
        running = current()
        if running is not None and not running.cache.attends(getattr(module, "layer_idx", None)):
            if isinstance(attention_mask, PassMask):
                attention_mask = attention_mask.own()
        elif isinstance(attention_mask, PassMask):
            raise RuntimeError(
                f"{type(module).__name__} attends to other keys than those returned by the "
                "compressed cache: it changes them after cache.update, or was given no cache (in "
                "training with gradient checkpointing, for instance); this does not work with a "
                "compressed cache"
            )
        own = _own(module, name)
        options |= {"scaling": scaling, "dropout": dropout}
        return own(module, query, key, value, attention_mask, **options)
    selects = key.cache.selects(key.layer)
    for option, kind in UNSERVED.items():
        if options.get(option) is not None and not (selects and option == CHOSEN):
            raise ValueError(
                f"{type(module).__name__} uses {kind} ({option}), which a compressed cache "
                "does not support"
            )
    if dropout or (query.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            "a compressed cache supports inference only: put the model in eval() and call it under "
            "torch.inference_mode() or torch.no_grad()"
        )
    running = current()
    if running is None or running.cache is not key.cache:
        raise RuntimeError(
            "new keys of a compressed cache reached attention after their forward pass"
        )
    chosen = None
    if selects:
        indices = options.get(CHOSEN)
        chosen = _chosen(module, attention_mask, indices, running, query.shape)
        if not isinstance(attention_mask, PassMask):
            attention_mask = _mask_of(running, query)
    columns = _columns(module, attention_mask, query.shape[2], options.get("is_causal"))
    columns = columns if chosen is None else replace(columns, chosen=chosen)
    begins = running.attended() and key.layer == 0  # another layer may read its keys later
    place = options.get("position_ids")  # most models pass them on
    if begins and query.shape[2] > 1 and isinstance(place, Tensor) and place.ndim == 2:
        key.cache.expect_next(place, columns.valid)
    fresh = key.as_subclass(Tensor)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    softmax = Softmax(scale, options.get("softcap"), options.get("s_aux"))
    if inner is not None:
        given = replace(inner, key=fresh)
        return key.cache.attend_latents(key.layer, given, softmax, columns), None
    if key.tiles > 1:
        return _tiled(key, query, value, softmax, columns), None
    return key.cache.attend(key.layer, query, fresh, value, softmax, columns), None


def _tiled(
    key: FreshKeys, query: Tensor, value: Tensor, softmax: Softmax, columns: PassColumns
) -> Tensor:
    """Attend with query heads that are in the order of repeated KV heads, not of GQA groups."""
    if softmax.sinks is not None:
        raise ValueError(
            "KV heads are repeated as a whole for query heads with attention sinks, which a "
            "compressed cache does not support"
        )
    heads = key.shape[1]
    grouped = query.unflatten(1, (key.tiles, heads)).transpose(1, 2).flatten(1, 2)
    given = grouped, key.as_subclass(Tensor), value[:, :heads]
    out = key.cache.attend(key.layer, *given, softmax, columns)
    by_tile: Tensor = out.unflatten(2, (heads, key.tiles)).transpose(2, 3).flatten(2, 3)
    return by_tile


def _absorbed(module: "nn.Module", query: Tensor, key: Tensor, value: Tensor) -> Absorbed | None:
    """Return the inputs of attention over latents, if the module's layer has handed some."""
    running = current()
    found = None if running is None else running.latents_of(getattr(module, "layer_idx", None))
    if running is None or found is None or isinstance(key, FreshKeys):
        return None
    layer, first = running.handed, not running.cache.columns
    inner = absorbed(module, found, query, key, value, compare=first)
    if layer is not None and inner.differs is not None:
        running.differs[layer] = inner.differs
    return replace(inner, key=FreshKeys.mark(inner.key, running.cache, found.layer))


def _columns(module: "nn.Module", mask: Any, length: int, is_causal: bool | None) -> PassColumns:
    """Return which new columns hold a token and what their queries see.

    Raises:
        ValueError: a query does not see every token up to some column.
    """
    kind = type(module).__name__
    if isinstance(mask, PassMask):
        reach = None if mask.reach is None else mask.reach()
        if mask.reach is not None and reach is None:
            raise ValueError(
                f"{kind} uses a mask under which a token does not see every token before it (a "
                "mask function); a compressed cache attends to everything it holds, so use a cache "
                "of transformers for this input"
            )
        valid = None if mask.held is None else mask.held[:, -length:].bool()
        return PassColumns(valid, reach)
    if mask is not None:
        shape = getattr(mask, "shape", None)
        what = f"of shape {tuple(shape)}" if shape is not None else f"of type {type(mask).__name__}"
        raise ValueError(
            f"an attention mask {what} reached {kind}; a compressed cache takes a 2D mask that "
            "marks padding"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal and length > 1:
        raise ValueError(
            f"{kind} attends in both directions (is_causal=False); a compressed cache attends "
            "causally, so use a cache of transformers"
        )
    return ALL


def _mask_of(running: Running, query: Tensor) -> PassMask:
    """Return the mask of layers that select tokens, which some models make of the 2D mask."""
    if running.mask is None:
        given, fresh = running.given, query.shape[2]
        given = None if given is None else given.to(query.device, torch.bool)
        _expect_columns(given, fresh, running.cache.columns + fresh)
        running.cache.expect_mask(given, fresh)
        held = torch.ones(1, 1, dtype=torch.bool) if given is None else given
        mask = held[:, None, None].as_subclass(PassMask)
        mask.held, mask.whole, mask.reach = given, False, None
        running.mask = mask
    assert isinstance(running.mask, PassMask)
    return running.mask


def _chosen(
    module: "nn.Module", mask: Any, indices: Any, running: Running, shape: torch.Size
) -> Bool[Tensor, "B Lq T"]:
    """Return which columns the queries of a layer attend to, of all before the pass and in it.

    Raises:
        RuntimeError: the layer says so neither by indices nor by a mask over all columns.
    """
    (batch, _, length, _), columns = shape, running.cache.columns + shape[2]
    if isinstance(indices, Tensor) and indices.ndim == 3:
        return columns_of(indices, columns)
    plain = isinstance(mask, Tensor) and not isinstance(mask, PassMask)
    if plain and mask.shape[1:] == (1, length, columns):
        chosen: Tensor = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        return chosen.expand(batch, -1, -1)
    if running.selected is not None and running.selected.ndim == 3:
        return columns_of(running.selected, columns)
    raise RuntimeError(
        f"{type(module).__name__} attends to tokens that an indexer selects, but neither their "
        f"indices nor a mask over all {columns} columns reached attention; use a cache of "
        "transformers"
    )


def _own(module: "nn.Module", name: str | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the attention function of the implementation that a module is configured for."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    home = vars(sys.modules[type(module).__module__])
    interface = home.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    found: Callable[..., tuple[Tensor, Tensor | None]] | None
    found = interface.get(name, home.get("eager_attention_forward"))
    if found is None:
        raise RuntimeError(
            f"{type(module).__name__} is configured for the attention implementation {name!r}, "
            "which is not found while another thread runs a pass over a compressed cache"
        )
    return found
