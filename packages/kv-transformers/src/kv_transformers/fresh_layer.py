"""A cache that attends itself, as transformers sees it: layers that hand fresh keys on."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kv_transformers.attention import FreshKeys
from kv_transformers.running import Running, current

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AttendingCache(Cache):
    """A cache of one model that attends itself."""

    def __init__(self, model: "PreTrainedModel", layers: "Sequence[FreshLayer]") -> None:
        """Belong to a model, which is not kept alive by it."""
        super().__init__(layers=list(layers))
        self._model = ref(model)

    @property
    def model(self) -> "PreTrainedModel | None":
        """The model that the cache was made for; None if it is gone."""
        return self._model()

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        scale: float,
        valid: Bool[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L *out"]:
        """Attend over everything held and the fresh tokens, then store those."""
        ...

    def expect_mask(self, mask: Bool[Tensor, "B T"] | None, fresh: int) -> None:
        """Refuse a 2D mask that differs from what the cache holds; before anything is stored.

        Args:
            mask: which of all columns hold a token, those of the pass last; None: all.
            fresh: columns of the pass.
        """

    def expect_next(self, position: Int[Tensor, "_ L"], valid: Bool[Tensor, "B L"] | None) -> None:
        """Refuse tokens that do not come after those that are held; before anything is stored.

        Args:
            position: of the columns of the pass, as the model counts them.
            valid: which of the columns hold a token; None: all.
        """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the fresh keys; the attention function takes them to the cache.

        Raises:
            RuntimeError: no pass of the cache's own model runs, keys of another layer were not
                attended to, or there is no such layer.
        """
        running = self._running()
        if layer_idx >= len(self.layers):
            raise RuntimeError(
                f"layer {layer_idx} asks for a compressed cache of {len(self.layers)} layers, "
                "which was made for another model; make a cache for the model that is run"
            )
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
                "called on), or model.forward was called in place of the model itself; make a "
                "CompressedCache for the model that is run, and call model(...)"
            )
        return running


class FreshLayer(CacheLayerMixin):
    """One layer of a cache that attends itself; nothing is kept here."""

    is_compileable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, cache: AttendingCache, index: int) -> None:
        """Stand for layer `index` of `cache`."""
        super().__init__()  # type: ignore[no-untyped-call]  # transformers declares no types here
        # The cache holds its layers: were they to hold it, its pages would wait for the garbage
        # collector once it is let go.
        self._attends, self._index = ref(cache), index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache allocates when a pass begins, if at all."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Mark the fresh keys; the attention function takes them to the cache.

        Raises:
            ReferenceError: the cache is gone.
        """
        cache = self._attends()
        if cache is None:
            raise ReferenceError(
                f"layer {self._index} outlived its cache; keep the cache itself and pass that on"
            )
        return FreshKeys.mark(key_states, cache, self._index), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns a mask has to cover: all that were seen."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen so far: none, unless a cache counts them."""
        return 0

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1
