"""The KV cache of a batch of sequences under a policy, independent of the engine."""

from kv_runtime.accounting import (
    AHEAD,
    Account,
    budget_tokens,
    chunk_budget,
    fit_page,
    kept_tokens,
    request_pages,
)
from kv_runtime.backends import (
    AUTO,
    Serving,
    backend_for,
    checked_backend,
    expect_known,
    remedy,
    serving,
)
from kv_runtime.bases import Bases, Folded, same_maps, widened
from kv_runtime.cache import PolicyCache
from kv_runtime.checks import check_basis, check_budgets, check_shift
from kv_runtime.decode_buffers import DecodeBuffers, captures
from kv_runtime.drafted_rows import store_drafts
from kv_runtime.drafts import split_requests
from kv_runtime.expanded import Expanded
from kv_runtime.fixed_rows import captures_pages, fixed_bytes
from kv_runtime.inspect import NOWHERE, Holding, Kind, Place, holding
from kv_runtime.layout import Layout
from kv_runtime.measure import HeldCopy, Measured, Meter, RequestHeld, held_by
from kv_runtime.memory import MemoryReport
from kv_runtime.outermost import Outermost
from kv_runtime.pending import TokenVectors, unlike_drafts
from kv_runtime.prefixes import PrefixPages, StoredPrefixes, appends_only
from kv_runtime.replay import ReplayChunk, Rereading
from kv_runtime.requests import RequestBatch, RequestRows, RequestStep
from kv_runtime.retain.plans import TurnCounts
from kv_runtime.rotation import (
    find_rope,
    growing_kind,
    joined_ropes,
    model_frequencies,
    needs_rotation,
    probe_positions,
)
from kv_runtime.saved import CacheFacts, CacheState, DamagedStateError
from kv_runtime.self_check import SelfCheck
from kv_runtime.slots import Blocks, SlotLayer, SlotStep, fit_block
from kv_runtime.stats import Tally
from kv_runtime.token_rows import TokenRows
from kv_runtime.verified import Column, Verified

__all__ = [
    "AHEAD",
    "AUTO",
    "NOWHERE",
    "Account",
    "Bases",
    "Blocks",
    "CacheFacts",
    "CacheState",
    "Column",
    "DamagedStateError",
    "DecodeBuffers",
    "Expanded",
    "Folded",
    "HeldCopy",
    "Holding",
    "Kind",
    "Layout",
    "Measured",
    "MemoryReport",
    "Meter",
    "Outermost",
    "Place",
    "PolicyCache",
    "PrefixPages",
    "ReplayChunk",
    "RequestBatch",
    "RequestHeld",
    "RequestRows",
    "RequestStep",
    "Rereading",
    "SelfCheck",
    "Serving",
    "SlotLayer",
    "SlotStep",
    "StoredPrefixes",
    "Tally",
    "TokenRows",
    "TokenVectors",
    "TurnCounts",
    "Verified",
    "appends_only",
    "backend_for",
    "budget_tokens",
    "captures",
    "captures_pages",
    "check_basis",
    "check_budgets",
    "check_shift",
    "checked_backend",
    "chunk_budget",
    "expect_known",
    "find_rope",
    "fit_block",
    "fit_page",
    "fixed_bytes",
    "growing_kind",
    "held_by",
    "holding",
    "joined_ropes",
    "kept_tokens",
    "model_frequencies",
    "needs_rotation",
    "probe_positions",
    "remedy",
    "request_pages",
    "same_maps",
    "serving",
    "split_requests",
    "store_drafts",
    "unlike_drafts",
    "widened",
]
