"""The caches that are compared: one of ours for a policy, transformers' own for `full`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_serve.backends import AUTO
from kv_serve.evaluate.specs import FULL

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

Kept = tuple[tuple[int, ...], ...]  # tokens of each layer's KV heads
MakeCache = Callable[["PreTrainedModel", str], "Cache"]


@dataclass(frozen=True, slots=True)
class Held:
    """What a cache holds, beside what an uncompressed one takes for the same tokens, in bytes.

    `kept` are the tokens kept by layer and KV head of one sequence after another; none are named
    of a cache that keeps all in any case.
    """

    kv_bytes: int
    full_bytes: int
    kept: tuple[Kept, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes held over the bytes of an uncompressed cache; 0 before the first token."""
        return self.kv_bytes / self.full_bytes if self.full_bytes else 0.0


def make_cache(model: "PreTrainedModel", spec: str, backend: str = AUTO) -> "Cache":
    """Make an empty cache for a policy's text form, or transformers' own for `full`.

    Raises:
        ValueError: `parse` or the cache refuses the policy for this model, or the backend.
    """
    if spec == FULL:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from kv_serve.hf.cache import CompressedCache

    return CompressedCache(model, spec, backend=backend)


def held(cache: "Cache") -> Held:
    """Count the bytes of a cache made by `make_cache`."""
    from transformers.cache_utils import DynamicLayer

    from kv_serve.hf.cache import CompressedCache

    if isinstance(cache, CompressedCache):
        report = cache.memory()
        kept = report.tokens.transpose(0, 1).tolist()
        return Held(
            report.total_bytes,
            report.full_bytes,
            tuple(tuple(map(tuple, layers)) for layers in kept),
        )
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    tensors = [t for layer in layers for t in (layer.keys, layer.values) if t is not None]
    size = sum(t.nbytes for t in tensors)
    return Held(size, size)
