"""Running the plan of an evaluation for a benchmark; a later run goes on from where one ended."""

from collections.abc import Iterator
from typing import Final

import _result
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kv_eval.evaluate.journal import Finished, Journal, open_journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.runner import TOGETHER, run
from kv_eval.tasks import default_text
from kv_transformers.from_text import FULL, MakeCache
from kv_transformers.models import LoadedModel

CONSOLE: Final = Console(stderr=True)


def evaluated(
    loaded: LoadedModel,
    plan: Plan,
    name: str,
    make: MakeCache | None = None,
    together: int = TOGETHER,
) -> Journal:
    """Run a plan; what was finished before an interruption is not run again.

    The journal is `<name>.partial` beside the results. `make` makes the caches, of which a prompt
    has up to `together` at once.
    """
    text = default_text()
    path = _result.RESULTS / f"{name}.partial"
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
