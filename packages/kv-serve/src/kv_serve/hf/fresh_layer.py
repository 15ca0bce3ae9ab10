"""A cache's layer as transformers sees it, which hands fresh keys on to the attention function."""

from weakref import ref

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kv_serve.hf.attention import Attends, FreshKeys


class FreshLayer(CacheLayerMixin):
    """One layer of a cache that attends itself; nothing is kept here."""

    is_compileable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, cache: Attends, index: int) -> None:
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
