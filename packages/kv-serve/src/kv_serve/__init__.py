"""Compressed KV caches inside vLLM, and the command `kv-serve`."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kv_transformers import CompressedCache, Fold, uninstall

__all__ = ["CompressedCache", "Fold", "uninstall"]

_MOVED: Final = frozenset(__all__)  # to kv_transformers; here for one release more


def __getattr__(name: str) -> object:
    """Return a name that moved to `kv_transformers`, with a deprecation warning."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    import kv_transformers

    warnings.warn(
        f"kv_serve.{name} moved: `from kv_transformers import {name}`; kv_serve offers it for one "
        "release more",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(kv_transformers, name)
