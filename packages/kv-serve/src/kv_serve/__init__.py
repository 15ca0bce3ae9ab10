"""Compressed KV caches inside transformers and vLLM, and a command line to measure them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_serve.hf.cache import CompressedCache

__all__ = ["CompressedCache"]


def __getattr__(name: str) -> object:
    """Import transformers only when the cache is asked for."""
    if name == "CompressedCache":
        from kv_serve.hf.cache import CompressedCache

        return CompressedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
