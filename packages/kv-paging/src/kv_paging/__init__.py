"""A pool of equal byte pages, and a stream of pages per sequence, layer and KV head."""

from kv_paging.checks import PoolExhausted
from kv_paging.kinds import Kinds
from kv_paging.layouts import fit
from kv_paging.pool import PagePool
from kv_paging.ragged import RaggedTiers
from kv_paging.ragged_store import RaggedStore
from kv_paging.store import TokenStore, read_slots, write_slots
from kv_paging.tiers import Tiers
from kv_paging.tokens import Stored

__all__ = [
    "Kinds",
    "PagePool",
    "PoolExhausted",
    "RaggedStore",
    "RaggedTiers",
    "Stored",
    "Tiers",
    "TokenStore",
    "fit",
    "read_slots",
    "write_slots",
]
