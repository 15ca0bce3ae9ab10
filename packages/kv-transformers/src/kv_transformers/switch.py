"""Switch a model to paged attention for forward passes with our caches only.

Hooks on the model see every forward call. A call with one of our caches switches the attention
implementation in the model's configuration, and its end switches it back. All other calls are
unaffected.
"""

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from threading import Lock
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from kv_transformers.attention import configured, switched
from kv_transformers.drafting import KEPT, drafts_of, unread
from kv_transformers.folded import FOLDED
from kv_transformers.fresh_layer import AttendingCache
from kv_transformers.running import current, enter, leave
from kv_transformers.support import UnsupportedModelError, of_decoder, silent_indexers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SWITCH: Final = "_kv_serve_switch"  # attribute of the decoder of a model with hooks
_MASK: Final = "attention_mask"
_PREPARE: Final = "prepare_inputs_for_generation"

P = ParamSpec("P")
R = TypeVar("R")


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from torch.compile, as a pass over pages is not traced."""
    kept: Callable[P, R] = torch.compiler.disable(function)
    return kept


class Switch:
    """The hooks of a model, and the number of its running calls with our caches."""

    def __init__(self) -> None:
        """Create a switch without models."""
        self.configs: list[PreTrainedConfig] = []  # of the decoder and its enclosing models
        self.models = WeakSet[nn.Module]()  # models that caches are made for
        self.active = 0
        self._lock = Lock()

    def add(self, model: nn.Module) -> None:
        """Add hooks to a model and to the modules inside it that pass its cache on."""
        for module in _holders(model):
            if not self._mine(module._forward_hooks):
                module.register_forward_pre_hook(self._begin, with_kwargs=True)
                module.register_forward_hook(self._end, always_call=True)
        for module in silent_indexers(model):
            if not self._mine(module._forward_hooks):
                module.register_forward_hook(self._selected)
        known = {id(config) for config in self.configs}
        self.configs += [config for config in _configs(model) if id(config) not in known]
        self.models.add(model)

    def remove(self, model: nn.Module) -> None:
        """Remove the hooks."""
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in self._mine(hooks):
                    del hooks[key]

    def _mine(self, hooks: Mapping[int, Callable[..., Any]]) -> list[int]:
        return [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]

    def _begin(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        cache, changed = _found(args, kwargs), None
        if cache is not None and cache.assisted:
            kwargs = unread(kwargs, cache.columns)
            changed = args, kwargs
        if cache is not None or self.active:
            self._enter(module, cache, args, kwargs)
        if (
            cache is not None
            and cache.shares
            and KEPT in kwargs
            and vars(module).get(_SWITCH) is self
        ):
            # Since 5.24, layers that read others' keys otherwise have the queries of these tokens
            # alone, and policies would score by those. The head selects what it reads again.
            changed = args, kwargs | {KEPT: 0}
        return changed

    def _end(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if self.active:
            self._leave(module, failed=output is None)

    @_untraced
    def _enter(
        self,
        module: nn.Module,
        cache: AttendingCache | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        ids = None if cache is None else _ids(args, kwargs)
        if cache is not None:
            self._expect_own(cache)
            running = current()
            if running is None or running.cache is not cache:  # once per pass
                _expect_served(module, kwargs)
                _expect_one_sequence_a_row(kwargs)
                cache.start(drafts_of(kwargs))
            cache.expect_ids(ids)
        indexes = cache is not None and cache.indexes
        enter(module, self, cache, ids, _mask_of(module, args, kwargs) if indexes else None)
        if cache is not None:
            with self._lock:
                self.active += 1
                for config in self.configs:
                    _name(config, switched(configured(config._attn_implementation)))

    @_untraced
    def _leave(self, module: nn.Module, failed: bool) -> None:
        frame = leave(module)
        if frame is None or frame.running is None:
            return
        self.ended()
        if frame.outermost and not failed:
            frame.running.expect_done()
            frame.running.cache.end(frame.running.ids)

    def _selected(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        running = current() if self.active else None
        if running is not None and isinstance(output, Tensor):
            running.selected = output

    def ended(self) -> None:
        """Decrement the number of running calls; after the last, restore the configuration."""
        with self._lock:
            self.active -= 1
            if not self.active:
                for config in self.configs:
                    _name(config, configured(config._attn_implementation))

    def _expect_own(self, cache: AttendingCache) -> None:
        """Raise if a cache was made for another model."""
        if cache.model not in self.models:
            raise RuntimeError(
                "this compressed cache was made for another model than the one it is passed to (a "
                "copy, a reloaded model or an assistant, for instance); create a CompressedCache "
                "for each model"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> "Switch":
        """Return an empty switch: a copied model needs its own installation."""
        made = Switch()
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[type["Switch"], tuple[()]]:
        """Pickle as an empty switch, like a copy: a loaded model is another model."""
        return Switch, ()


def install(model: "PreTrainedModel") -> None:
    """Add the hooks that a model needs for our caches; calls without them do not change.

    Raises:
        UnsupportedModelError: the model does not use transformers' attention interface; nothing
            was installed.
    """
    from transformers import PreTrainedModel

    holders = _holders(model)
    decoder = holders[-1]
    if isinstance(decoder, PreTrainedModel) and not decoder._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(decoder).__name__} does not support setting its attention implementation, "
            "which a compressed cache needs"
        )
    switch: Switch | None = getattr(decoder, _SWITCH, None)
    if switch is None:
        switch = Switch()
        setattr(decoder, _SWITCH, switch)
    if model not in switch.models:
        switch.add(model)
        for module in holders:
            _watch_prepared(module)


def uninstall(model: "PreTrainedModel") -> None:
    """Remove the hooks that `CompressedCache` and `Fold` add to a model.

    Needed only if the hooks cause problems, such as with `torch.save(model)` for a process without
    kv-serve. Existing caches of the model raise afterwards.

    Args:
        model: the model that a cache was made for.

    Raises:
        ValueError: the model is folded, and would be wrong without the hooks.
    """
    if getattr(model.base_model, FOLDED, None) is not None:
        raise ValueError("the model's projections are folded for a policy; restore the model first")
    decoder = _holders(model)[-1]
    switch: Switch | None = getattr(decoder, _SWITCH, None)
    if switch is None:
        return
    switch.remove(model)
    delattr(decoder, _SWITCH)
    for module in model.modules():
        prepared = vars(module).get(_PREPARE)
        if isinstance(prepared, Prepared):
            prepared.restore(module)


def decoder_of(model: "PreTrainedModel") -> nn.Module:
    """Return the innermost module of a model that takes token ids and its cache: its decoder."""
    return _holders(model)[-1]


def _holders(model: nn.Module) -> list[nn.Module]:
    """Return the model and the modules in it that pass its cache on, ending with the decoder."""
    from transformers import PreTrainedModel

    text = _text(model.config)
    return [
        module
        for module in model.modules()
        if module is model or (isinstance(module, PreTrainedModel) and _text(module.config) is text)
    ]


def _configs(model: nn.Module) -> "Iterator[PreTrainedConfig]":
    """Yield the configurations used by the decoder's attention and masks, each once."""
    from transformers import PreTrainedConfig

    text, seen = _text(model.config), set[int]()
    for module in model.modules():
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig) or id(config) in seen:
            continue
        seen.add(id(config))
        if of_decoder(config, text):
            yield config


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _name(config: "PreTrainedConfig", name: str | None) -> None:
    """Set the attention implementation of one configuration, but not of nested ones."""
    if config._attn_implementation != name:
        config._attn_implementation = {"": name}


def _found(args: tuple[object, ...], kwargs: Mapping[str, object]) -> AttendingCache | None:
    """Return our cache among the arguments of a call."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, AttendingCache):
            return value
    return None


def _ids(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor | None:
    """Return the token ids of a call, by transformers' name or as its first argument."""
    found = kwargs.get("input_ids", args[0] if args else None)
    return found if isinstance(found, Tensor) and not found.is_floating_point() else None


def _mask_of(
    module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Tensor | None:
    """Return the 2D mask of a call, wherever it is among the arguments."""
    given = signature(module.forward).bind_partial(*args, **kwargs).arguments
    found = given.get(_MASK, kwargs.get(_MASK))
    return found if isinstance(found, Tensor) and found.ndim == 2 else None


def _expect_served(module: nn.Module, kwargs: Mapping[str, object]) -> None:
    """Raise if an argument is not supported with a compressed cache."""
    if kwargs.get("use_cache") is False:
        raise ValueError(
            "use_cache=False was given together with a compressed cache, which would store each "
            "token again at every step; omit one of them"
        )
    if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ValueError(
            "output_attentions was given together with a compressed cache, which returns no "
            "attention weights (kv-serve inspect shows what a policy reads); omit one of them"
        )


def _expect_one_sequence_a_row(kwargs: Mapping[str, object]) -> None:
    """Raise if positions decrease within a row; only prefill synchronizes with the device."""
    position, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(position, Tensor) or position.ndim != 2 or position.shape[1] < 2:
        return
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= position.shape[1]:
        held = mask[:, -position.shape[1] :].to(position.device) != 0
        position = position.masked_fill(~held, -1)
        back = held & (position < position.cummax(-1).values)
    else:
        back = position.diff(dim=-1) < 0
    if bool(back.any()):
        raise ValueError(
            "position_ids decrease within a row, so it holds several sequences, which a compressed "
            "cache would treat as one; put each sequence in its own row"
        )


class Prepared:
    """Wrapper of a model's own `prepare_inputs_for_generation`, which must keep our cache."""

    def __init__(self, inner: Callable[..., Mapping[str, object]]) -> None:
        """Wrap the model's method; `generate` inspects its signature."""
        self.__wrapped__ = inner

    def __call__(self, *args: object, **kwargs: object) -> Mapping[str, object]:
        """Call the model's method.

        Raises:
            RuntimeError: the model discarded a compressed cache and would continue without it.
        """
        prepared = self.__wrapped__(*args, **kwargs)
        cache = _found(args, kwargs)
        if cache is not None and _found((), prepared) is None:
            model: Any = getattr(self.__wrapped__, "__self__", cache.model)
            limit = getattr(_text(model.config), "original_max_position_embeddings", None)
            where = f" past {limit} tokens (original_max_position_embeddings)" if limit else ""
            raise RuntimeError(
                f"{type(model).__name__} discards its cache{where} and recomputes everything with "
                "an uncompressed one; keep prompt and answer together below that, or use a cache "
                "of transformers"
            )
        return prepared

    def restore(self, module: nn.Module) -> None:
        """Restore the module's own method."""
        inner = self.__wrapped__
        if isinstance(inner, MethodType) and inner.__self__ is module:
            delattr(module, _PREPARE)
        else:
            setattr(module, _PREPARE, inner)


def _watch_prepared(module: nn.Module) -> None:
    """Wrap `prepare_inputs_for_generation` of a model that overrides it."""
    from transformers import GenerationMixin

    own = getattr(type(module), _PREPARE, None)
    if own is None or own is GenerationMixin.prepare_inputs_for_generation:
        return
    inner = getattr(module, _PREPARE)
    if not isinstance(inner, Prepared):
        setattr(module, _PREPARE, Prepared(inner))
