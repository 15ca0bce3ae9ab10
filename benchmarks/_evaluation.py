"""Running the plan of an evaluation for a benchmark; a later run resumes it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import _result
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kv_eval.evaluate.intervals import of_change, of_mean
from kv_eval.evaluate.journal import Finished, Journal, open_journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.runner import TOGETHER, run
from kv_eval.tasks import default_text
from kv_transformers.from_text import FULL, MakeCache
from kv_transformers.models import LoadedModel

CONSOLE: Final = Console(stderr=True)
Row = dict[str, object]


def evaluated(
    loaded: LoadedModel,
    plan: Plan,
    name: str,
    make: MakeCache | None = None,
    together: int = TOGETHER,
    folder: Path = _result.RESULTS,
) -> Journal:
    """Run a plan; what was finished before an interruption is not run again.

    The journal is `<name>.partial` beside the results, in `folder`. `make` makes the caches, of
    which a prompt has up to `together` at once.
    """
    text = default_text()
    path = folder / f"{name}.partial"
    journal, sentence = open_journal(path, plan.identity(loaded, text))
    if sentence:
        CONSOLE.print(sentence)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    total = len(plan.pairs) * len(plan.policies) * plan.samples
    with Progress(*columns, console=CONSOLE) as progress:
        bar = progress.add_task("samples", total=total)
        for entry in run(loaded, plan, text, journal, make, together):
            progress.update(bar, advance=1, description=f"{entry.task}: {entry.policy}")
    return journal


def samples_of(plan: Plan, journal: Journal, spec: str) -> Iterator[tuple[Finished, Finished]]:
    """A policy's samples beside those of the full cache."""
    for task, setting in plan.pairs:
        for i in range(plan.samples):
            mine, full = (journal.get(s, task, setting, i) for s in (spec, FULL))
            assert mine is not None
            assert full is not None
            yield mine, full


def cells(
    loaded: LoadedModel, plan: Plan, journal: Journal, names: Mapping[str, str]
) -> Iterator[Row]:
    """Yield the mean of each policy in each cell, with its interval and that of the change.

    `names` are what policies are called. `bytes` are of those of a full cache in 16 bits, and
    `tokens` those kept per KV head, of the prompt's.
    """
    element = torch.empty(0, dtype=loaded.model.dtype).element_size()
    for task, setting in plan.pairs:
        full = finished(plan, journal, FULL, task, setting)
        for spec in plan.policies:
            found = finished(plan, journal, spec, task, setting)
            yield cell(found, full, FULL if spec == FULL else names[spec], element)


def cell(samples: Sequence[Finished], full: Sequence[Finished], name: str, element: int) -> Row:
    """Return the means of a policy's samples beside those of the full cache; see `cells`."""
    first, scores = samples[0], [each.score for each in samples]
    held = fmean(each.kv_bytes / each.full_bytes for each in samples) * element / 2
    shares = [each.kept_share for each in samples if each.kept_share is not None]
    is_full = first.policy == FULL
    return {
        "kind": "cell",
        "name": name,
        "task": first.task,
        "setting": first.setting,
        "policy": first.policy,
        "samples": len(scores),
        "mean": fmean(scores),
        "interval": of_mean(scores),
        "change": None if is_full else of_change(scores, [each.score for each in full]),
        "bytes": 1.0 if is_full else held,
        "tokens": 1.0 if is_full else fmean(shares),
    }


def finished(plan: Plan, journal: Journal, spec: str, task: str, setting: str) -> list[Finished]:
    """Return a policy's finished samples of a cell."""
    found = [journal.get(spec, task, setting, i) for i in range(plan.each)]
    return [entry for entry in found if entry is not None]
