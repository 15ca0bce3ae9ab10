"""Create caches and fold models by a policy's text; `full` is transformers' own cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kv_policy import UnknownPolicyError, parse
from kv_runtime import AUTO

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from kv_transformers.models import LoadedModel

FULL: Final = "full"  # transformers' own cache, the baseline

Kept = tuple[tuple[int, ...], ...]  # tokens by layer and KV head
MakeCache = Callable[["PreTrainedModel", str], "Cache"]


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a cache and of an uncompressed one for the same tokens, in bytes.

    `kept` has the kept tokens by sequence, layer and KV head; empty for a cache that always keeps
    all.
    """

    kv_bytes: int
    full_bytes: int
    kept: tuple[Kept, ...] = ()

    @property
    def ratio(self) -> float:
        """Stored bytes over the bytes of an uncompressed cache; 0 before the first token."""
        return self.kv_bytes / self.full_bytes if self.full_bytes else 0.0


def read_spec(spec: str) -> str:
    """Return the canonical form of a policy's text; `full` is unchanged.

    Raises:
        ValueError: `parse` rejects the text.
    """
    if spec == FULL:
        return FULL
    try:
        return str(parse(spec))
    except UnknownPolicyError as error:
        own = f"`{FULL}`, alone, names transformers' own cache"
        raise UnknownPolicyError(f"{error}; {own}") from None


def make_cache(
    model: "PreTrainedModel",
    spec: str,
    backend: str = AUTO,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> "Cache":
    """Create an empty cache for a policy's text, or transformers' own for `full`.

    Args:
        model: the model.
        spec: the text.
        backend: the attention backend of a compressed cache.
        tokenizer: the model's, for policies that read a prompt again.

    Raises:
        ValueError: `parse` or the cache rejects the policy for this model, or the backend.
    """
    if spec == FULL:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from kv_transformers.cache import CompressedCache

    return CompressedCache(model, spec, backend=backend, tokenizer=tokenizer)


def caches_of(loaded: "LoadedModel", backend: str = AUTO) -> MakeCache:
    """Return what creates the caches of a loaded model, with its tokenizer."""
    return partial(make_cache, backend=backend, tokenizer=loaded.tokenizer)


def held(cache: "Cache") -> CacheSize:
    """Count the bytes of a cache made by `make_cache`.

    Bounds of the keys in pages are computed in the first decode step; before it, those of all
    pages of the tier are counted as if they were there.
    """
    from kv_policy.pages import bound_bytes
    from kv_transformers.cache import CompressedCache
    from kv_transformers.layers import cache_bytes

    if isinstance(cache, CompressedCache):
        report, later = cache.memory(), 0
        batch = cache.runtime.batch
        reading = cache.policy.reading
        if reading is not None and batch is not None:
            pages = batch.layout.pages[0][0]
            each = bound_bytes(pages.format.key.dim, pages.tokens, reading.coded)
            later = max(0, batch.tiers.pages_used * each - report.bound_bytes)
        kept = report.tokens.transpose(0, 1).tolist()
        return CacheSize(
            report.total_bytes + later,
            report.full_bytes,
            tuple(tuple(map(tuple, layers)) for layers in kept),
        )
    size = cache_bytes(cache.layers)
    return CacheSize(size, size)


@contextmanager
def folded(model: "PreTrainedModel", spec: str) -> Iterator[str | None]:
    """Fold the basis of a policy's text, if it has one, during a `with` block.

    Yields None, or the reason why the basis cannot be folded into this model. In that case the
    policy's cache projects the output back itself. A folded checkpoint is left as it is.

    Raises:
        ValueError: `parse` rejects the policy, it was calibrated with another model, or the model
            is folded already.
    """
    policy = None if spec == FULL else parse(spec)
    from kv_transformers.models.mark import mark_of

    if policy is None or policy.basis is None or mark_of(model.config) is not None:
        yield None
        return
    from kv_transformers.fold import Fold
    from kv_transformers.support import UnsupportedModelError

    fold, reason = None, None
    try:
        fold = Fold(model, policy)
    except UnsupportedModelError as error:
        reason = str(error)
    try:
        yield reason
    finally:
        if fold is not None:
            fold.restore()
