"""What a compressed cache is asked: prompts with hidden numbers, and windows of plain text."""

from kv_serve.tasks.hidden import multikey, needle
from kv_serve.tasks.sample import Sample, Setting, TaskError, TaskName
from kv_serve.tasks.scoring import agreement_share, found, nats_per_token
from kv_serve.tasks.text import Text, default_text, read_text
from kv_serve.tasks.windows import agreement, nll

__all__ = [
    "Sample",
    "Setting",
    "TaskError",
    "TaskName",
    "Text",
    "agreement",
    "agreement_share",
    "default_text",
    "found",
    "multikey",
    "nats_per_token",
    "needle",
    "nll",
    "read_text",
]
