"""Attention over pages of compressed keys and values, in partial results that merge exactly."""

from kv_attention.attention import attend
from kv_attention.backends import (
    BackendChoice,
    all_backends,
    available,
    can_capture,
    check_backend,
    choose_backend,
    load_backend,
    load_rows,
)
from kv_attention.checks import check_softmax, longest_of
from kv_attention.inputs import AttentionInputs
from kv_attention.page_bounds import PageBounds, logit_bounds, page_scores
from kv_attention.partial import Partial, Scored
from kv_attention.peak import attend_and_score, attend_partly, largest_probabilities
from kv_attention.ragged import HeadGroup, attend_ragged
from kv_attention.reading import select_pages
from kv_attention.rows import DecodeRows, RowGroup, RowInputs, RowMaps, RowMemo, TokenPlaces
from kv_attention.tokens import Attended, DenseTokens

__all__ = [
    "Attended",
    "AttentionInputs",
    "BackendChoice",
    "DecodeRows",
    "DenseTokens",
    "HeadGroup",
    "PageBounds",
    "Partial",
    "RowGroup",
    "RowInputs",
    "RowMaps",
    "RowMemo",
    "Scored",
    "TokenPlaces",
    "all_backends",
    "attend",
    "attend_and_score",
    "attend_partly",
    "attend_ragged",
    "available",
    "can_capture",
    "check_backend",
    "check_softmax",
    "choose_backend",
    "largest_probabilities",
    "load_backend",
    "load_rows",
    "logit_bounds",
    "longest_of",
    "page_scores",
    "select_pages",
]
