"""Compressed KV caches inside transformers and vLLM, and a command line to measure them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_serve.hf.cache import CompressedCache
    from kv_serve.hf.fold import Fold
    from kv_serve.hf.switch import uninstall

__all__ = ["CompressedCache", "Fold", "uninstall"]


def __getattr__(name: str) -> object:
    """Import transformers only when what needs it is asked for."""
    if name == "CompressedCache":
        from kv_serve.hf.cache import CompressedCache

        return CompressedCache
    if name == "Fold":
        from kv_serve.hf.fold import Fold

        return Fold
    if name == "uninstall":
        from kv_serve.hf.switch import uninstall

        return uninstall
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
