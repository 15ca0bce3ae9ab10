"""A pool of equal byte pages, and a table row of pages per sequence, layer and KV head."""

from kv_paging.checks import PoolExhausted
from kv_paging.kernels import page_kernels_of
from kv_paging.layouts import fit
from kv_paging.pool import PagePool
from kv_paging.ragged import PerHeadRankTiers
from kv_paging.ragged_store import PerHeadRankStore
from kv_paging.rank_groups import RankGroups
from kv_paging.store import TokenStore, read_slots, write_slots
from kv_paging.tiers import Tiers
from kv_paging.tokens import Stored

__all__ = [
    "PagePool",
    "PerHeadRankStore",
    "PerHeadRankTiers",
    "PoolExhausted",
    "RankGroups",
    "Stored",
    "Tiers",
    "TokenStore",
    "fit",
    "page_kernels_of",
    "read_slots",
    "write_slots",
]
