"""Inspection of a cache: where each token of a prompt is stored under a policy."""

from kv_runtime import NOWHERE, Holding, Place, holding

__all__ = ["NOWHERE", "Holding", "Place", "holding"]
