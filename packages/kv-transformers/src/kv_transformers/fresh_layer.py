"""The transformers interface of a cache that computes attention itself: layers mark new keys."""

from abc import abstractmethod
from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import ref

from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionLayer,
)

from kv_transformers.attention import FreshKeys
from kv_transformers.latents import Absorbed, Latents
from kv_transformers.layers import INDEXED, LayerCache, layer_caches
from kv_transformers.pass_columns import PassColumns
from kv_transformers.running import Running, current
from kv_transformers.softmax import Softmax

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AttendingCache(Cache):
    """A cache of one model that computes the attention of its full-attention layers itself.

    The other layers (sliding windows, linear attention, convolutions) have transformers' own cache
    layers, and the model's own attention.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        """Bind the cache to a model through a weak reference."""
        self._kinds = layer_caches(model.config.get_text_config(decoder=True))
        self._selecting = frozenset(kind.index for kind in self._kinds if kind.is_indexed)
        super().__init__(layers=self._empty_layers())
        self._model = ref(model)

    def _empty_layers(self) -> list[Any]:
        """Return a layer for each of the model's, without tokens."""
        return [_layer(self, kind) for kind in self._kinds]

    def _copied_layers(self, owner: "AttendingCache", memo: dict[int, object]) -> list[Any]:
        """Return a copy of each layer for another cache."""
        made = owner._empty_layers()
        for kind, new, old in zip(self._kinds, made, self.layers, strict=True):
            if kind.keeps_own:
                kept = {name: x for name, x in vars(old).items() if name != "_attends"}
                vars(new).update(deepcopy(kept, memo))
        return made

    @property
    def own_layers(self) -> Iterator[Any]:
        """What transformers keeps: of layers of its own, states, and the keys of indexers."""
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            if kind.keeps_own:
                yield layer.indexer if isinstance(layer, IndexedLayer) else layer

    @property
    def columns(self) -> int:
        """Number of columns seen, including padding and evicted tokens; 0 if none are stored."""
        return 0

    @property
    def shares(self) -> bool:
        """Whether layers of the model read keys and values of others."""
        return any(kind.is_reader for kind in self._kinds)

    @property
    def reads_shared(self) -> bool:
        """Whether layers read keys and values that this cache stores for others."""
        return any(kind.readers for kind in self._kinds)

    @property
    def indexes(self) -> bool:
        """Whether layers that it attends for select tokens, for which they read whole masks."""
        return bool(self._selecting)

    def selects(self, layer: int) -> bool:
        """Whether a layer, of those that it attends for, selects tokens for each query."""
        return layer in self._selecting

    def attends(self, layer: int | None) -> bool:
        """Whether the cache computes the attention of a layer of the model."""
        if layer is None or not 0 <= layer < len(self._kinds):
            return True
        return self._kinds[layer].index is not None

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the columns that a mask must cover: all columns seen."""
        return self.columns + query_length, 0

    @property
    def assisted(self) -> bool:
        """Whether passes are those of assisted generation, with drafts that a crop may remove."""
        return False

    def start(self, drafts: int = 0) -> None:
        """Prepare for a pass of the model over this cache, with drafts in assisted generation."""

    @property
    def model(self) -> "PreTrainedModel | None":
        """The model the cache was made for; None if it has been deleted."""
        return self._model()

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq Lq D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        softmax: Softmax,
        columns: PassColumns,
    ) -> Float[Tensor, "B Lq *out"]:
        """Attend over the stored and the new tokens, then store the new ones."""
        ...

    @property
    def expands(self) -> bool:
        """Whether the next pass may attend to keys and values that the model expands."""
        return False

    def attend_latents(
        self, layer: int, given: Absorbed, softmax: Softmax, columns: PassColumns
    ) -> Float[Tensor, "B L Hq Dv"]:
        """Attend over the stored and the new latents, then store the new ones."""
        out = self.attend(layer, given.query, given.key, given.value, softmax, columns)
        return given.heads(out)

    def expect_mask(self, mask: Bool[Tensor, "B T"] | None, fresh: int) -> None:
        """Raise if a 2D mask differs from the stored columns, before anything is stored.

        Args:
            mask: which columns hold a token, those of the pass last; None: all.
            fresh: number of columns of the pass.
        """

    def expect_next(self, position: Int[Tensor, "_ L"], valid: Bool[Tensor, "B L"] | None) -> None:
        """Raise if tokens do not follow the stored ones, before anything is stored.

        Args:
            position: positions of the pass's columns.
            valid: which of the columns hold a token; None: all.
        """

    def expect_ids(self, ids: Int[Tensor, "B L"] | None) -> None:
        """Raise if a call without token ids is not supported, before anything is stored."""

    def end(self, ids: Int[Tensor, "B L"] | None) -> None:
        """Complete a pass over these token ids, after the model's own computation."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the new keys, so that the attention function calls the cache.

        Raises:
            RuntimeError: no pass of the cache's own model is running, keys of another layer were
                not attended to, or the layer does not exist.
        """
        running = self._running()
        if layer_idx >= len(self._kinds):
            raise RuntimeError(
                f"layer {layer_idx} uses a compressed cache of {len(self.layers)} layers, which "
                "was made for another model; create a cache for the model that runs"
            )
        if self._kinds[layer_idx].index is None:
            running.skip()
        else:
            running.hand(layer_idx)
        marked: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return marked

    def _running(self) -> Running:
        running = current()
        if running is None or running.cache is not self:
            raise RuntimeError(
                "this compressed cache was made for another model than the one that uses it (a "
                "copy or a reloaded model, for instance, or one that kv_transformers.uninstall was "
                "called on), or model.forward was called instead of the model itself; create a "
                "CompressedCache for the model that runs, and call model(...)"
            )
        return running


class FreshLayer(CacheLayerMixin):
    """One layer of a cache that computes attention itself; the layer stores nothing."""

    is_compileable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, cache: AttendingCache, index: int) -> None:
        """Represent layer `index` of those whose tokens `cache` stores."""
        super().__init__()  # type: ignore[no-untyped-call]  # transformers declares no types here
        # The cache references its layers. A strong reference back would be a cycle, and its pages
        # would be freed only by the garbage collector.
        self._attends, self._index = ref(cache), index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the cache allocates when a pass begins."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Mark the new keys, so that the attention function calls the cache.

        Raises:
            ReferenceError: the cache has been deleted.
        """
        cache = self._attends()
        if cache is None:
            raise ReferenceError(
                f"layer {self._index} outlived its cache; keep the cache itself and pass that on"
            )
        return FreshKeys.mark(key_states, cache, self._index), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the columns that a mask must cover: all columns seen."""
        cache = self._attends()
        return (query_length, 0) if cache is None else cache.mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Return the number of columns seen, including padding and evicted tokens."""
        cache = self._attends()
        return 0 if cache is None else cache.columns

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1


# Transformers combines these bases, too; one has `is_croppable` as an attribute, one as a property.
class StatefulLayer(LinearAttentionLayer, FreshLayer):  # type: ignore[override]
    """A layer with full attention and a state of fixed size, which it keeps (Falcon-H1, Zamba2)."""

    is_compileable = False

    def __init__(self, cache: AttendingCache, index: int, number_of_states: int = 1) -> None:
        """Represent layer `index` of those whose tokens `cache` stores."""
        FreshLayer.__init__(self, cache, index)
        LinearAttentionLayer.__init__(self, number_of_states)


class LatentLayer(FreshLayer):
    """A layer of latent attention, whose latents the attention function takes from the pass."""

    is_compileable = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand new latents and rotated keys to the pass; return those that the model expands.

        The model expands what it is given to keys and values, and a mark would not outlive that.
        """
        running, cache = current(), self._attends()
        assert running is not None  # checked by the cache's update
        whole = cache is not None and cache.expands and key_states.shape[2] > 1
        running.latents = Latents(self._index, key_states, value_states, whole)
        return running.latents.given


class IndexedLayer(FreshLayer):
    """A layer that attends to the tokens that its indexer selects, whose keys it keeps (DSA).

    Attributes:
        indexer: transformers' own cache layer, which has these keys alone, of all tokens.
    """

    is_compileable = False

    def __init__(self, cache: AttendingCache, index: int) -> None:
        """Represent layer `index` of those whose tokens `cache` stores."""
        self.indexer = DYNAMIC_LAYER_TYPE_MAPPING[INDEXED]()
        super().__init__(cache, index)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append keys of the indexer and return all."""
        keys: Tensor = self.indexer.update_indexer(indexer_key_states)
        return keys

    def get_seq_length(self) -> int:
        """Return the number of columns seen, those of the pass included once they have keys."""
        keys = self.indexer.indexer_keys
        return super().get_seq_length() if keys is None else keys.shape[1]

    @property
    def keys(self) -> Tensor | None:
        """No keys, in the shape of those of all columns, which a model reads (GLM-5 Next)."""
        keys = self.indexer.indexer_keys
        return None if keys is None else keys.new_zeros(1, 1, 1, 1).expand(-1, -1, keys.shape[1], 1)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        """Ignore that transformers has none for an empty layer."""

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions of all tokens, which some models keep here (Qwen4)."""
        found: Tensor | None = self.indexer.indexer_position_ids
        return found

    @indexer_position_ids.setter
    def indexer_position_ids(self, position: Tensor) -> None:
        self.indexer.indexer_position_ids = position


class IndexedLatentLayer(IndexedLayer, LatentLayer):
    """A layer of latent attention to the tokens that its indexer selects (DeepSeek V3.2)."""

    is_compileable = False


def _layer(cache: AttendingCache, kind: LayerCache) -> Any:
    """Return an empty cache layer of one kind."""
    if kind.index is None:
        unused = kind.is_reader and kind.kind not in DYNAMIC_LAYER_TYPE_MAPPING
        made = DYNAMIC_LAYER_TYPE_MAPPING["full_attention" if unused else kind.kind]
        return made(**kind.options)
    if kind.has_state:
        return StatefulLayer(cache, kind.index, **kind.options)
    if kind.is_indexed:
        return (IndexedLatentLayer if kind.latent else IndexedLayer)(cache, kind.index)
    return (LatentLayer if kind.latent else FreshLayer)(cache, kind.index)
