"""Evaluation tasks: prompts with hidden answers, and windows of plain text."""

from kv_eval.tasks.counting import common_words
from kv_eval.tasks.hidden import multikey, needle, passkey, variable_tracking
from kv_eval.tasks.ruler import RULER, ruler_samples
from kv_eval.tasks.sample import Match, RulerName, Sample, Setting, TaskError, TaskName
from kv_eval.tasks.scoring import (
    agreement_share,
    found,
    found_share,
    match_all,
    match_part,
    nats_per_token,
)
from kv_eval.tasks.text import Text, default_text, read_text
from kv_eval.tasks.windows import agreement, nll

__all__ = [
    "RULER",
    "Match",
    "RulerName",
    "Sample",
    "Setting",
    "TaskError",
    "TaskName",
    "Text",
    "agreement",
    "agreement_share",
    "common_words",
    "default_text",
    "found",
    "found_share",
    "match_all",
    "match_part",
    "multikey",
    "nats_per_token",
    "needle",
    "nll",
    "passkey",
    "read_text",
    "ruler_samples",
    "variable_tracking",
]
