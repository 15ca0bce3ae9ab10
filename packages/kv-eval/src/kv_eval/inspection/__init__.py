"""What a cache holds of each token, and what is left of a prompt under a policy."""

from kv_runtime import NOWHERE, Holding, Place, holding

__all__ = ["NOWHERE", "Holding", "Place", "holding"]
