"""The section with the commands that reproduce the results."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kv_eval.evaluate.plan import GROUPS, WITHOUT_QUESTION
from kv_eval.evaluate.report import Report, Row
from kv_eval.report.markup import Markup, join, tag, text
from kv_eval.report.read import Source
from kv_transformers.from_text import FULL

_OPTIONS: Final = ("host", "batch", "continuation")  # settings with the names of options
_SAID: Final = frozenset({"model", "length", "samples", "seed", "seeds"})  # shown elsewhere
_ABOUT = "Add a text other than the default, and a dtype or device that was requested explicitly."


def run(sources: Sequence[Source]) -> Markup:
    """Describe for every file what was run, on what, and how to reproduce it."""
    return join(*map(_file, sources), tag("p", {"class": "note"}, text(_ABOUT)))


def commands(report: Report) -> tuple[str, ...]:
    """Return the commands that measure a report's rows, one for each length, samples and seeds.

    >>> from kv_eval.evaluate.report import Report, Row
    >>> row = Row(policy="k8v4", task="nll", setting="agnostic", length=9, samples=2, seed=0,
    ...     score=1.0, full_score=1.0, kv_bytes=1.0, full_bytes=2.0, seconds=0.0)
    >>> print(*commands(Report(model="m", commit="", versions={}, rows=(row,))))
    kv-serve eval --model m --policy k8v4 --task nll --length 9 --samples 2 --seed 0 --json FILE
    """
    groups: dict[tuple[int, int, int, int], list[Row]] = {}
    for row in report.rows:
        groups.setdefault((row.length, row.samples, row.seed, row.seeds), []).append(row)
    return tuple(_command(report, rows) for rows in groups.values())


def _command(report: Report, rows: Sequence[Row]) -> str:
    policies = [p for p in dict.fromkeys(row.policy for row in rows) if p != FULL] or [FULL]
    settings = {row.setting for row in rows if row.task not in WITHOUT_QUESTION}
    first = rows[0]
    words = ["kv-serve", "eval", "--model", report.model]
    for policy in policies:
        words += ["--policy", policy]
    named = dict.fromkeys(row.task for row in rows)
    inside = {task for name in named for task in GROUPS.get(name, ())}
    for task in named:
        words += [] if task in inside else ["--task", task]
    if len(settings) == 1:
        words += ["--setting", *settings]
    words += ["--length", f"{first.length}", "--samples", f"{first.samples // first.seeds}"]
    words += ["--seed", f"{first.seed}"]
    if first.seeds > 1:
        words += ["--seeds", f"{first.seeds}"]
    for name in _OPTIONS:
        if name in report.settings:
            words += [f"--{name}", f"{report.settings[name]}"]
    return shlex.join([*words, "--json", "FILE"])


def _file(source: Source) -> Markup:
    report = source.report
    served = "unknown" if report.attention is None else str(report.attention)
    facts = {
        "model": report.model,
        "commit": report.commit,
        "attention": served,
        "tasks": _all(f"{row.task} ({row.setting})" for row in report.rows),
        "length": _all(f"{row.length:,} tokens" for row in report.rows),
        "samples": _all(f"{row.samples:,}" for row in report.rows),
        "seed": _all(_seeds(row) for row in report.rows),
        "settings": _named(report.settings, leave=_SAID),
        "machine": _named(report.machine),
        "versions": _all(f"{name} {version}" for name, version in report.versions.items()),
    }
    return tag(
        "article",
        None,
        tag("h3", None, text(source.name)),
        tag("dl", None, *(fact(name, value) for name, value in facts.items() if value)),
        *(tag("pre", {"tabindex": "0"}, tag("code", None, text(c))) for c in commands(report)),
    )


def _seeds(row: Row) -> str:
    return str(row.seed) if row.seeds == 1 else f"{row.seed} to {row.seed + row.seeds - 1}"


def _named(values: Mapping[str, object], leave: Iterable[str] = ()) -> str:
    return _all(f"{name} {value}" for name, value in values.items() if name not in leave)


def fact(name: str, value: str) -> Markup:
    """Write a line of a list of facts."""
    return join(tag("dt", None, text(name)), tag("dd", None, text(value)))


def _all(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
