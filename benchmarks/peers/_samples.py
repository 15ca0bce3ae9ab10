"""The samples that all are asked, made once by `kv_eval.tasks`."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from _work import Ask

from kv_eval.tasks import Sample, Setting, agreement, default_text, multikey, needle, nll
from kv_transformers.models import LoadedModel

CellName = tuple[str, str]  # task and setting
Samples = Mapping[CellName, tuple[Sample, ...]]
BOTH: tuple[Setting, Setting] = ("aware", "agnostic")
TASKS = ("needle", "multikey", "nll", "agreement")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    length: int = 2000  # tokens of a prompt and its question
    samples: int = 16
    continuation: int = 64  # tokens that nll scores
    new_tokens: int = 32  # that agreement compares


QUICK = Size(length=300, samples=2, continuation=4, new_tokens=4)


def made(loaded: LoadedModel, size: Size) -> Samples:
    """Make all samples of all cells."""
    tokenizer, text = loaded.tokenizer, default_text()
    length, count = size.length, size.samples
    found: dict[CellName, tuple[Sample, ...]] = {}
    for name, make in (("needle", needle), ("multikey", multikey)):
        for setting in BOTH:
            found[name, setting] = make(
                tokenizer, text, length=length, samples=count, setting=setting
            )
    found["nll", "agnostic"] = nll(
        tokenizer, text, length=length, samples=count, continuation=size.continuation
    )
    found["agreement", "agnostic"] = agreement(
        tokenizer, text, length=length, samples=count, new_tokens=size.new_tokens
    )
    return found


def of(samples: Samples, task: str | None, setting: str | None) -> Samples:
    """Those of a task, or of a setting; of all where none is named.

    Raises:
        ValueError: the task does not come in that setting.
    """
    found = {
        cell: each
        for cell, each in samples.items()
        if task in (None, cell[0]) and setting in (None, cell[1])
    }
    if not found:
        there = ", ".join(" ".join(cell) for cell in samples)
        raise ValueError(f"no samples of {task} {setting}; there are {there}")
    return found


def asks(samples: tuple[Sample, ...]) -> tuple[Ask, ...]:
    """The same without what is right."""
    return tuple(
        Ask(s.prompt_ids, s.question_ids, s.target_ids, s.new_tokens, s.stop) for s in samples
    )


def digest(samples: Samples) -> str:
    """16 hexadecimal digits that tell other samples apart."""
    plain = {
        " ".join(name): [
            [s.prompt_ids, s.question_ids, s.target_ids, s.new_tokens, s.stop, s.answers]
            for s in each
        ]
        for name, each in samples.items()
    }
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
