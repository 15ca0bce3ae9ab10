"""Which basis the keys and values of a head are stored in, and how many dimensions they need."""

from kv_svd.fit import Moments, Rotation, basis, of_output, of_queries, of_tokens, ranks, rotation
from kv_svd.io import load, save

__all__ = [
    "Moments",
    "Rotation",
    "basis",
    "load",
    "of_output",
    "of_queries",
    "of_tokens",
    "ranks",
    "rotation",
    "save",
]
