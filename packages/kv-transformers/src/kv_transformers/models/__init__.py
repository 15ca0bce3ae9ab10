"""Find models by name, convert them once if needed, and load them with their tokenizer."""

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
