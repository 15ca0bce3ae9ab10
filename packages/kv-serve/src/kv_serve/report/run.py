"""What was run, so that it can be run again."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Final

from kv_serve.evaluate.report import Report, Row
from kv_serve.evaluate.specs import FULL
from kv_serve.report.markup import Markup, join, tag, text
from kv_serve.report.read import Source

_QUESTIONS: Final = frozenset({"needle", "multikey"})  # the tasks that have two settings
_ABOUT = (
    "A result file does not say which text, numbers, device, batch and continuation it was "
    "measured with: where those were not the defaults, name them as well."
)


def run(sources: Sequence[Source]) -> Markup:
    """Say of every file what was run, on what, and how to run it again."""
    return join(*map(_file, sources), tag("p", {"class": "note"}, text(_ABOUT)))


def commands(report: Report) -> tuple[str, ...]:
    """Write the commands that measure a report's rows, one for each length, samples and seed.

    >>> from kv_serve.evaluate.report import Report, Row
    >>> row = Row(policy="k8v4", task="nll", setting="agnostic", length=9, samples=2, seed=0,
    ...     score=1.0, full_score=1.0, kv_bytes=1.0, full_bytes=2.0, seconds=0.0)
    >>> print(*commands(Report(model="m", commit="", versions={}, rows=(row,))))
    kv-serve eval --model m --policy k8v4 --task nll --length 9 --samples 2 --seed 0 --json FILE
    """
    groups: dict[tuple[int, int, int], list[Row]] = {}
    for row in report.rows:
        groups.setdefault((row.length, row.samples, row.seed), []).append(row)
    return tuple(_command(report.model, rows) for rows in groups.values())


def _command(model: str, rows: Sequence[Row]) -> str:
    policies = [p for p in dict.fromkeys(row.policy for row in rows) if p != FULL] or [FULL]
    settings = {row.setting for row in rows if row.task in _QUESTIONS}
    first = rows[0]
    words = ["kv-serve", "eval", "--model", model]
    for policy in policies:
        words += ["--policy", policy]
    for task in dict.fromkeys(row.task for row in rows):
        words += ["--task", task]
    if len(settings) == 1:
        words += ["--setting", *settings]
    words += ["--length", f"{first.length}", "--samples", f"{first.samples}"]
    words += ["--seed", f"{first.seed}", "--json", "FILE"]
    return shlex.join(words)


def _file(source: Source) -> Markup:
    report = source.report
    served = "not said" if report.attention is None else str(report.attention)
    facts = {
        "model": report.model,
        "commit": report.commit,
        "attention": served,
        "tasks": _all(f"{row.task} ({row.setting})" for row in report.rows),
        "length": _all(f"{row.length:,} tokens" for row in report.rows),
        "samples": _all(f"{row.samples:,}" for row in report.rows),
        "seed": _all(str(row.seed) for row in report.rows),
        "versions": _all(f"{name} {version}" for name, version in report.versions.items()),
    }
    return tag(
        "article",
        {"class": "whole"},
        tag("h3", None, text(source.name)),
        tag("dl", None, *(fact(name, value) for name, value in facts.items())),
        *(tag("pre", {"tabindex": "0"}, tag("code", None, text(c))) for c in commands(report)),
    )


def fact(name: str, value: str) -> Markup:
    """Write a line of a list of facts."""
    return join(tag("dt", None, text(name)), tag("dd", None, text(value)))


def _all(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
