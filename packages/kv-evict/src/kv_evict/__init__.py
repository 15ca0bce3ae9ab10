"""Which tokens of which head live: eviction policies of the literature."""

from kv_evict.snapkv import SnapKV
from kv_evict.streaming import Streaming

__all__ = ["SnapKV", "Streaming"]
