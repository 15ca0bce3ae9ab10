"""Which basis the keys and values of a head are stored in, and how many dimensions they need."""

from kv_svd.fit import Moments, Rotation, basis, of_output, of_queries, of_tokens, ranks, rotation
from kv_svd.io import load, save
from kv_svd.rates import Allotment, at_rate, at_removal, uniform

__all__ = [
    "Allotment",
    "Moments",
    "Rotation",
    "at_rate",
    "at_removal",
    "basis",
    "load",
    "of_output",
    "of_queries",
    "of_tokens",
    "ranks",
    "rotation",
    "save",
    "uniform",
]
