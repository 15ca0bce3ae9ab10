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

Rows are kept in a file beside the result until all are there, and a later run goes on from it.
`--only` asks one task anew, `--setting` one setting, and what the result has of others stays in it;
`--environment` runs a part, and what the result has of the others is joined to it; `--missing` asks
only the ways that the result lacks, and what they are compared with. KVzip's nats and
agreement are compared with the full cache of kvpress, which must be run with it. Who is best in a
cell, of a task and a setting, is said when all ways have answered; until then a cell that was whole
stays as the result had it. `--together` environments answer at the same time. `--times` writes
`peers_times` instead: seconds of reading a prompt and of a step, over those of the full cache in
the same process, ways in turn.
"""

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock

import _result
from _arguments import count
from _partial import Partial
from _samples import BOTH, QUICK, TASKS, CellName, Samples, Size, asks, digest, made, of
from _scripts import Run
from _table import (
    cell_rows,
    earlier,
    environments,
    figures,
    joined,
    missing,
    of_cells,
    to_ask,
    ways,
)
from _times import clocked
from _ways import LONGEST_FIRST, WAYS, asked
from _work import Cell, Row, Work
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kv_eval.evaluate.decode import ends_of
from kv_transformers.models import LoadedModel, load_model

CONSOLE = Console(stderr=True)
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


def answer(
    run: Run,
    samples: Samples,
    partial: Partial,
    given: argparse.Namespace,
    asks_for: Callable[[str, CellName], tuple[str, ...]],
) -> None:
    """Let environments answer what is not there yet, some at the same time.

    `asks_for` says which ways of an environment in a cell.

    Raises:
        RuntimeError: a script failed; what it and the others answered is kept.
    """
    one_at_a_time, commit = Lock(), _result.commit(replaced="peers")

    def ask(name: str) -> None:
        cells = tuple(
            Cell(*cell, ways, asks(each))
            for cell, each in samples.items()
            if (ways := asks_for(name, cell))
        )
        work = Work(run.model, run.ends, cells, partial.done(name))
        if not (left := sum(len(found) for *_, found in work.open())):
            return
        bar = progress.add_task(name, total=left)
        for row in run.rows(name, work):
            with one_at_a_time:
                partial.take(name, commit, row)
            progress.update(bar, advance=int("way" in row))

    with (
        Progress(*COLUMNS, console=CONSOLE) as progress,
        ThreadPoolExecutor(given.together) as pool,
    ):
        started = [pool.submit(ask, name) for name in given.environment or LONGEST_FIRST]
        try:
            for each in as_completed(started):
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def answered(loaded: LoadedModel, samples: Samples, partial: Partial, cell: CellName) -> list[Row]:
    """The rows of a cell that were answered now."""
    decode = lambda tokens: str(loaded.tokenizer.decode(list(tokens)))  # noqa: E731
    return environments(partial, cell) + ways(partial, samples, cell, decode)


def there(about: Row) -> list[Row]:
    """The rows of the result that is there, if one is."""
    try:
        return earlier(_result.rows_of("peers"), about)
    except FileNotFoundError:
        return []


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
    parser.add_argument("--only", choices=TASKS, help="one task; others stay")
    parser.add_argument("--setting", choices=BOTH, help="one setting; the other stays")
    parser.add_argument("--missing", action="store_true", help="ways that the result lacks only")
    parser.add_argument("--environment", action="append", choices=tuple(WAYS), help="these only")
    parser.add_argument(
        "--together", type=count, default=2, help="environments that answer at once"
    )
    parser.add_argument("--times", action="store_true", help="measure seconds, and no answers")
    parser.add_argument("--rounds", type=count, default=7, help="of timing")
    parser.add_argument("--environments", type=Path, required=True, help="folder; nox gives it")
    return parser.parse_args()


def main() -> None:
    """Run what is asked, and write the result if it is whole."""
    given = options()
    loaded = load_model(progress=CONSOLE.print)
    ends = tuple(sorted(ends_of(loaded.model)))
    threads = None if given.times else max(1, (os.cpu_count() or 1) // given.together)
    run = Run(str(loaded.folder), ends, given.environments, threads)
    samples = made(loaded, QUICK if given.quick else Size())
    cells = of(samples, given.only, given.setting)
    if given.times:
        summary, rows = clocked(run, samples, given.environment, 1 if given.quick else given.rounds)
        _result.write("peers_times", summary, rows, quick=given.quick)
        return
    about: Row = {"samples": digest(samples), "model": loaded.fingerprint}
    first: Row = {"kind": "about", **about}
    before = [] if given.quick else there(first)
    name = "_".join(("peers", *filter(None, (given.only, given.setting))))
    partial = Partial(None if given.quick else _result.RESULTS / f"{name}.partial", about)
    gaps = {cell: to_ask(of_cells(before, (cell,)), cell, given.quick) for cell in cells}

    def asks_for(name: str, cell: CellName) -> tuple[str, ...]:
        if given.missing:
            return gaps[cell].get(name, ())
        return asked(name, cell[1], quick=given.quick)

    answer(run, cells, partial, given, asks_for)
    fresh = {cell: answered(loaded, samples, partial, cell) for cell in cells}
    lacking: list[str] = []
    rows = of_cells(before, samples.keys() - cells.keys())
    for cell, now in fresh.items():
        earlier_rows = of_cells(before, (cell,))
        lacking += missing(joined(now, earlier_rows), cell, given.quick)
        rows += cell_rows(now, earlier_rows, cell, given.quick)
    for sentence in lacking:
        print(f"missing: {sentence}", file=sys.stderr)
    chosen = [row for row in rows if row["kind"] == "choice"]
    show(chosen)
    _result.write("peers", figures(chosen), [first, *rows], quick=given.quick)
    if not lacking:
        partial.remove()


if __name__ == "__main__":
    main()
