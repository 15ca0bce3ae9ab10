"""Models: found by name, converted once where needed, loaded with their tokenizer."""

from kv_serve.models.convert import cache_root
from kv_serve.models.load import LoadedModel, load_model, model_folder
from kv_serve.models.source import DEFAULT_MODEL, ModelError, Progress, Source, resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "LoadedModel",
    "ModelError",
    "Progress",
    "Source",
    "cache_root",
    "load_model",
    "model_folder",
    "resolve_model",
]
