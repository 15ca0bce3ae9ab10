# environment: peers
"""Ours and other projects' ways to hold a KV cache, on equal work: same model, prompts, questions.

Each peer runs in an environment of its own, by a script beside this one that prints a row for every
sample: the tokens that were generated, or the nats of a text, and the bytes that the cache held
after the prompt. Scores are computed here, the same way for all, and against the full cache of the
peer's own program.

Held is what the cache's accounting says, or the memory behind its tensors where that is more. What
a method hides but keeps is held. At 50, 25 and 12.5 % of an uncompressed cache in bfloat16 the best
of ours stands beside the best of the peers, each chosen from its list in `_ways.py` by the same
rule (`_choose.best`), on the samples that are shown. The lists are not of one length: the longer
one has more to choose from.

Rows are kept in `results/peers.partial`, and a later run goes on from there; `--only` and
`--environment` run a part. `--finished` writes the cells that have all of their rows. `--times`
writes `peers_times` instead: seconds of reading a prompt and of a step, over those of the full
cache in the same process, ways in turn.
"""

import argparse
import sys
from pathlib import Path

import _result
from _partial import Partial
from _samples import QUICK, TASKS, Samples, Size, asks, digest, made
from _scripts import Run
from _table import choices, environments, figures, missing, ways
from _times import clocked
from _ways import WAYS, asked
from _work import Cell, Row, Work
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kv_serve.evaluate.decode import ends_of
from kv_serve.models import LoadedModel, load_model

CONSOLE = Console(stderr=True)
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


def answer(run: Run, samples: Samples, partial: Partial, given: argparse.Namespace) -> None:
    """Let every environment answer what is not there yet."""
    with Progress(*COLUMNS, console=CONSOLE) as progress:
        for name in given.environment or WAYS:
            cells = tuple(
                Cell(task, setting, asked(name, setting, quick=given.quick), asks(each))
                for (task, setting), each in samples.items()
                if given.only in (None, task)
            )
            work = Work(run.model, run.ends, cells, partial.done(name))
            left = sum(len(found) for *_, found in work.open())
            if left:
                bar, commit = progress.add_task(name, total=left), _result.commit()
                for row in run.rows(name, work):
                    partial.take(name, commit, row)
                    progress.update(bar, advance=int("way" in row))


def judged(loaded: LoadedModel, samples: Samples, partial: Partial) -> tuple[list[Row], list[Row]]:
    """The rows of the result, and those of them that are choices."""
    rows: list[Row] = []
    chosen: list[Row] = []
    for cell in samples:
        decode = lambda tokens: str(loaded.tokenizer.decode(list(tokens)))  # noqa: E731
        table = ways(partial, samples, cell, decode)
        chosen += choices(table, cell)
        rows += [{name: v for name, v in row.items() if name != "scores"} for row in table]
    return [*environments(partial), *rows, *chosen], chosen


def show(chosen: list[Row]) -> None:
    """Print who wins."""
    for row in chosen:
        print(
            f"{row['task']:9} {row['setting']:8} {row['budget']:6} {row['winner']:5} "
            f"{row['ours']:8.4f} {row['ours_held']:.3f} {row['ours_way']:40} "
            f"{row['peer']:8.4f} {row['peer_held']:.3f} {row['peer_way']}"
        )


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--only", choices=TASKS, help="one task, which a later run goes on from")
    parser.add_argument("--environment", action="append", choices=tuple(WAYS), help="these only")
    parser.add_argument("--finished", action="store_true", help="write the cells that are whole")
    parser.add_argument("--times", action="store_true", help="measure seconds, and no answers")
    parser.add_argument("--rounds", type=int, default=7, help="of timing")
    parser.add_argument("--environments", type=Path, required=True, help="folder; nox gives it")
    return parser.parse_args()


def main() -> None:
    """Run what is asked, and write the result if it is whole."""
    given = options()
    loaded = load_model(progress=CONSOLE.print)
    ends = tuple(sorted(ends_of(loaded.model)))
    run = Run(str(loaded.folder), ends, given.environments)
    samples = made(loaded, QUICK if given.quick else Size())
    if given.times:
        summary, rows = clocked(run, samples, given.environment, 1 if given.quick else given.rounds)
        _result.write("peers_times", summary, rows, quick=given.quick)
        return
    path = None if given.quick else _result.RESULTS / "peers.partial"
    partial = Partial(path, {"samples": digest(samples), "model": loaded.fingerprint})
    answer(run, samples, partial, given)
    lacking = {name: missing(partial, name, len(samples[name]), given.quick) for name in samples}
    for sentence in (sentence for found in lacking.values() for sentence in found):
        print(f"missing: {sentence}", file=sys.stderr)
    whole = {name: each for name, each in samples.items() if not lacking[name]}
    rows, chosen = judged(loaded, whole, partial)
    show(chosen)
    if len(whole) == len(samples) or (whole and given.finished):
        _result.write("peers", figures(chosen), rows, quick=given.quick)
        if len(whole) == len(samples):
            partial.remove()


if __name__ == "__main__":
    main()
