"""A pool of fixed-size byte pages, and a table row of pages per sequence, layer and KV head."""

from kv_paging.bounding import bound_decoded, bounds_in
from kv_paging.checks import PoolExhausted
from kv_paging.head_pages import (
    adopt_all,
    branch_all,
    clear_all,
    expect_joined,
    join_all,
    release_all,
    select_all,
)
from kv_paging.huge_pages import back_with_huge_pages
from kv_paging.kernels import (
    PageKernels,
    can_capture_pages,
    declined,
    page_kernels_of,
    select_page_kernels,
)
from kv_paging.key_codes import codes_of
from kv_paging.layouts import fit
from kv_paging.marks import Mark
from kv_paging.pool import PagePool
from kv_paging.ragged import PerHeadRankTiers
from kv_paging.ragged_store import PerHeadRankStore
from kv_paging.rank_groups import RankGroups
from kv_paging.saved import SavedRows, restore_rows, saved_rows
from kv_paging.store import TokenStore, read_slots, write_slots
from kv_paging.tiers import Tiers
from kv_paging.tokens import BOTH, NONE, Stored, VectorNames
from kv_paging.work import CopiedRows, DecodeStep, NewTokens, Placement, Recoding, TokenWrite

__all__ = [
    "BOTH",
    "NONE",
    "CopiedRows",
    "DecodeStep",
    "Mark",
    "NewTokens",
    "PageKernels",
    "PagePool",
    "PerHeadRankStore",
    "PerHeadRankTiers",
    "Placement",
    "PoolExhausted",
    "RankGroups",
    "Recoding",
    "SavedRows",
    "Stored",
    "Tiers",
    "TokenStore",
    "TokenWrite",
    "VectorNames",
    "adopt_all",
    "back_with_huge_pages",
    "bound_decoded",
    "bounds_in",
    "branch_all",
    "can_capture_pages",
    "clear_all",
    "codes_of",
    "declined",
    "expect_joined",
    "fit",
    "join_all",
    "page_kernels_of",
    "read_slots",
    "release_all",
    "restore_rows",
    "saved_rows",
    "select_all",
    "select_page_kernels",
    "write_slots",
]
