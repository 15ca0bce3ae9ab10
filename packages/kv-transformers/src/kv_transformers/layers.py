"""What each layer of a model caches, and which layers' keys and values a policy stores."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from kv_transformers.latents import is_latent

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Types of transformers whose layers attend to every token.
FULL: Final = ("full_attention", "attention")
INDEXED: Final = "indexed_attention"  # to the tokens that an indexer selects for each query
BOTH: Final = "hybrid"  # full attention beside a state of fixed size, in one layer
DUMMY: Final = "dummy"  # no cache
# What the caches of some types take; transformers before 5.19 has one set of arguments for all.
TAKEN: Final[Mapping[str, Sequence[str]]] = {
    "sliding_window": ("sliding_attention", "hybrid_sliding", "chunked_attention"),
    "number_of_states": ("conv", "linear_attention", BOTH, "hybrid_sliding"),
    "config": ("heavily_compressed_attention", "compressed_sparse_attention"),
}
READS: Final = (
    "reuse",
    "reuse_but_indexer",
)  # modes in which a layer reads those of an earlier one


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer of a model caches.

    Attributes:
        kind: transformers' type of the layer, such as `full_attention` or `sliding_attention`.
        options: arguments of transformers' own cache layer of this type.
        index: the layer's index among those whose keys and values a policy stores; None: the layer
            keeps transformers' own cache, such as that of a sliding window.
        readers: further layers of the model that read the keys and values of this one.
        is_reader: whether the layer reads those of an earlier one, and caches nothing.
        latent: whether it caches latents instead of keys and values (MLA).
    """

    kind: str
    options: Mapping[str, Any]
    index: int | None = None
    readers: int = 0
    is_reader: bool = False
    latent: bool = False

    @property
    def has_state(self) -> bool:
        """Whether a layer that the policy stores also keeps a state of fixed size."""
        return self.index is not None and self.kind == BOTH

    @property
    def is_indexed(self) -> bool:
        """Whether a layer that the policy stores attends to tokens that an indexer selects."""
        return self.index is not None and self.kind == INDEXED

    @property
    def keeps_own(self) -> bool:
        """Whether transformers keeps something of the layer, beside the stored tokens or alone."""
        return self.index is None or self.has_state or self.is_indexed


def layer_caches(config: "PreTrainedConfig") -> tuple[LayerCache, ...]:
    """Return what each layer of a decoder caches, by the configuration of the decoder."""
    kinds, options = _kinds(config)
    stored = [i for i, kind in enumerate(kinds) if kind in (*FULL, BOTH, INDEXED)]
    index = {layer: i for i, layer in enumerate(stored)}
    reading = _readers(config)
    full = sum(kind in (*FULL, INDEXED) for kind in reading.values())
    readers = {layer: full for layer in stored[-1:]}  # it is the last that is shared
    return tuple(
        LayerCache(
            kind,
            MappingProxyType(given),
            index=index.get(i),
            readers=readers.get(i, 0),
            is_reader=i in reading,
            latent=is_latent(each),
        )
        for i, (kind, given, each) in enumerate(
            zip(kinds, options, config.per_layer_config, strict=True)
        )
    )


def stored_layers(model: "PreTrainedModel") -> tuple[int, ...]:
    """Return the indices of the model's layers whose keys and values a policy stores."""
    caches = layer_caches(model.config.get_text_config(decoder=True))
    return tuple(i for i, cache in enumerate(caches) if cache.index is not None)


def _readers(config: "PreTrainedConfig") -> Mapping[int, str]:
    """Return the types of layers that read the keys and values of an earlier one, by index."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:  # older transformers: it is the last layers that share
        count, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", None) or 0
        modes = [None] * (count - shared) + ["reuse"] * shared
    kinds = getattr(config, "layer_types", None) or FULL[:1] * len(modes)
    pairs = enumerate(zip(modes, kinds, strict=False))  # a model may have an empty list of modes
    return {i: kind for i, (mode, kind) in pairs if mode in READS}


def _kinds(config: "PreTrainedConfig") -> tuple[Sequence[str], Sequence[dict[str, Any]]]:
    """Return the type of each layer, and the arguments of transformers' own cache layers."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, options = get_layer_types_and_kwargs(config)
    if isinstance(options, Mapping):
        options = [{k: x for k, x in options.items() if kind in TAKEN[k]} for kind in kinds]
    missing = len(config.per_layer_config) - len(kinds)  # older transformers: those that share
    return [*kinds, *[DUMMY] * missing], [*options, *({} for _ in range(missing))]


def cache_bytes(layers: Iterable[Any]) -> int:
    """Count the bytes of transformers' cache layers: keys, values and states.

    A sliding window is a view until the next pass, and holds all of its storage.
    """
    found = {}
    for layer in layers:
        for x in _tensors(vars(layer).values()):
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among attributes of a layer that have a dimension."""
    for value in values:
        if isinstance(value, Tensor) and value.ndim:
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())


def records_past(layer: Any) -> bool:
    """Whether one of transformers' cache layers keeps what it drops otherwise, until `crop`."""
    from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

    drops = isinstance(layer, DynamicSlidingWindowLayer | LinearAttentionCacheLayerMixin)
    return drops and bool(layer.record_past)


def expect_croppable(layers: Iterable[Any]) -> None:
    """Raise if one of transformers' cache layers cannot take tokens back.

    Raises:
        ValueError: it has a recurrent state, or it has dropped tokens and did not record them.
    """
    for layer in layers:
        name = type(layer).__name__
        if not layer.is_croppable:
            raise ValueError(
                f"a layer of this model ({name}) has a recurrent state, which cannot take tokens "
                "back; prefill the shorter text again"
            )
        if not records_past(layer) and _drops(layer):
            raise ValueError(
                f"a layer of this model ({name}) has dropped tokens that taking others back would "
                "need; call activate_past_recording() on the cache before the tokens to take back, "
                "as assisted generation does, or prefill the shorter text again"
            )


def _drops(layer: Any) -> bool:
    """Whether a layer has dropped tokens: a convolution, or a sliding window that is full."""
    from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

    if isinstance(layer, DynamicSlidingWindowLayer):
        return bool(layer.get_seq_length() >= layer.sliding_window)
    return isinstance(layer, LinearAttentionCacheLayerMixin)
