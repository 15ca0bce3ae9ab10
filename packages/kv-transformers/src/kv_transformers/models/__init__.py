"""Models: found by name, converted once where needed, loaded with their tokenizer."""

from kv_transformers.models.convert import cache_root, damage, place
from kv_transformers.models.load import LoadedModel, load_model, model_folder
from kv_transformers.models.source import (
    DEFAULT_MODEL,
    DEFAULT_PACKAGE,
    ModelError,
    Progress,
    Source,
    resolve_model,
)

__all__ = [
    "DEFAULT_MODEL",
    "DEFAULT_PACKAGE",
    "LoadedModel",
    "ModelError",
    "Progress",
    "Source",
    "cache_root",
    "damage",
    "load_model",
    "model_folder",
    "place",
    "resolve_model",
]
