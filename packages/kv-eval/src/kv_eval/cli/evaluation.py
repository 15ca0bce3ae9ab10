"""An evaluation in a terminal: the progress bar, interruption, and the table of results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kv_transformers.cli.console import INTERRUPTED, out, progress, refusing, remark, writing

if TYPE_CHECKING:
    from kv_eval.evaluate.journal import Finished, Journal
    from kv_eval.evaluate.report import Layers, Row
    from kv_runtime import Serving
    from kv_transformers.models import LoadedModel

Tell = Callable[[str], None]
SAVED = "; the samples are saved in {}, and the same command resumes from them"


@dataclass(frozen=True, slots=True)
class SampleRun:
    """Samples to run.

    Attributes:
        settings: everything the samples depend on.
        total: number of samples; None if unknown in advance.
        run: runs the samples, skipping those in the journal; calls back with its progress.
        rows: summarizes a complete journal.
        kept: returns the tokens kept per head, by policy.
        policies: the policies to compare.
    """

    settings: Mapping[str, str | int]
    total: int | None
    run: "Callable[[Journal, Tell], Iterator[Finished]]"
    rows: "Callable[[Journal], tuple[Row, ...]]"
    kept: "Callable[[Journal], Mapping[str, Layers]]"
    policies: tuple[str, ...]


@contextmanager
def resumable(journal: "Journal", partial: Path) -> Iterator[None]:
    """Exit with a remark where Ctrl-C interrupts samples; the journal has the finished ones."""
    try:
        yield
    except KeyboardInterrupt:
        remark(
            f"Interrupted. {len(journal)} samples are finished and saved in {partial}; run the "
            "same command again to resume."
        )
        raise typer.Exit(INTERRUPTED) from None


def finish(
    loaded: "LoadedModel", works: Sequence[SampleRun], path: Path, served: "Serving | None"
) -> None:
    """Run all samples, write the JSON file, and print its rows as a table."""
    from kv_eval.evaluate.journal import open_journal
    from kv_eval.evaluate.machine import machine
    from kv_eval.evaluate.provenance import commit
    from kv_eval.evaluate.report import Report, spectra
    from kv_policy.installing import versions

    code, under = commit(), versions()
    partial = path.with_name(path.name + ".partial")
    settings = {name: value for work in works for name, value in work.settings.items()}
    with refusing(ValueError):  # fail early
        singular = spectra([spec for work in works for spec in work.policies])
    measured = {"commit": code, "versions": under, "attention": str(served)}
    with refusing(ValueError):
        journal, sentence = open_journal(partial, {**settings, **measured})
    if sentence:
        remark(sentence)
    with resumable(journal, partial):
        _run(works, journal)
    found = tuple(row for work in works for row in work.rows(journal))
    report = Report(
        model=loaded.name,
        commit=code,
        versions=under,
        settings=settings,
        machine=machine(),
        attention=served,
        rows=found,
        kept={name: layers for work in works for name, layers in work.kept(journal).items()},
        spectra=singular,
    )
    with writing(path, SAVED.format(partial)):
        report.write(path)
    journal.remove()
    _show(found)
    remark(f"Written to {path}.")


def _run(works: Sequence[SampleRun], journal: "Journal") -> None:
    totals = [work.total for work in works]
    total = None if None in totals else sum(each for each in totals if each is not None)
    with refusing(ValueError), progress() as shown:
        bar = shown.add_task("creating the samples", total=total)

        def tell(words: str) -> None:
            shown.update(bar, description=words)

        for work in works:
            for entry in work.run(journal, tell):
                tell(f"{entry.task}, {entry.setting}: {entry.policy}")
                shown.update(bar, advance=1)


def _show(rows: "Sequence[Row]") -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("policy", "task", "setting"):
        table.add_column(name)
    apart = any(row.divergence is not None for row in rows)
    more = ("KL", "KL 99.9 %") if apart else ()
    kept = any(row.kept_share is not None for row in rows)
    held = ("KV bytes", "of full", *(("tokens",) if kept else ()))
    for name in ("score", "95 %", "full", *more, *held, "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            escape(row.policy),
            row.task,
            row.setting,
            f"{row.score:.3f}",
            _interval(row.score_interval),
            f"{row.full_score:.3f}",
            *((_number(row.divergence), _number(row.divergence_tail)) if apart else ()),
            f"{row.kv_bytes:,.0f}",
            f"{row.kv_bytes / row.full_bytes:.3f}",
            *((_number(row.kept_share, 3),) if kept else ()),
            f"{row.seconds:.1f}",
        )
    out().print(table)


def _number(of: float | None, digits: int = 4) -> str:
    return "" if of is None else f"{of:.{digits}f}"


def _interval(of: tuple[float, float] | None) -> str:
    return "" if of is None else f"{of[0]:.3f} to {of[1]:.3f}"
