"""Compressed KV caches for the models of Hugging Face transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kv_transformers.cache import CompressedCache
    from kv_transformers.cache_argument import passing
    from kv_transformers.document import Document
    from kv_transformers.fold import Fold
    from kv_transformers.models import LoadedModel, ModelError, load_model
    from kv_transformers.support import UnsupportedModelError, cache_shape
    from kv_transformers.switch import uninstall

__all__ = [
    "CompressedCache",
    "Document",
    "Fold",
    "LoadedModel",
    "ModelError",
    "UnsupportedModelError",
    "cache_shape",
    "load_model",
    "passing",
    "uninstall",
]

_MODULES: Final = {
    "CompressedCache": "cache",
    "Document": "document",
    "Fold": "fold",
    "LoadedModel": "models",
    "ModelError": "models",
    "UnsupportedModelError": "support",
    "cache_shape": "support",
    "load_model": "models",
    "passing": "cache_argument",
    "uninstall": "switch",
}


def __getattr__(name: str) -> object:
    """Import transformers only when a name that needs it is used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
