"""Which tokens of which head live, and at which precision: policies of the literature."""

from kv_evict.leankv import LeanKV
from kv_evict.leankv_profile import Profile
from kv_evict.snapkv import SnapKV
from kv_evict.streaming import Streaming

__all__ = ["LeanKV", "Profile", "SnapKV", "Streaming"]
