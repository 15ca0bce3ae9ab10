"""`kv-serve eval`: what policies cost in answers and save in bytes, as a JSON file."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_serve.cli.console import INTERRUPTED, check_writable, out, progress, refusing, remark
from kv_serve.cli.options import (
    BackendOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelOption,
    caches_by,
    expect_backend,
    load_model,
)

if TYPE_CHECKING:
    from kv_serve.evaluate.caches import MakeCache
    from kv_serve.evaluate.journal import Journal
    from kv_serve.evaluate.plan import Plan
    from kv_serve.evaluate.report import Row
    from kv_serve.models import LoadedModel
    from kv_serve.tasks import Text


class Task(StrEnum):
    """The tasks of `kv_serve.tasks`."""

    NEEDLE = "needle"
    MULTIKEY = "multikey"
    NLL = "nll"
    AGREEMENT = "agreement"


class Where(StrEnum):
    """Where the question stands: inside the compressed prompt, or after it."""

    AWARE = "aware"
    AGNOSTIC = "agnostic"
    BOTH = "both"


def evaluate(
    policy: Annotated[
        list[str],
        typer.Option(
            help="Policies to compare, between commas or as repeated options, for example "
            "k8v4,snapkv:budget=1024,window=32+k8v4. A comma starts the next policy when no `=` "
            "follows before the next comma, `+` or `:`. `full`, transformers' own cache, is always "
            "run, and may stand alone."
        ),
    ],
    task: Annotated[
        list[Task],
        typer.Option(
            help="needle: find one number hidden in a text. multikey: one of four. nll: nats per "
            "token of a true continuation. agreement: share of greedy tokens equal to the full "
            "cache's. May be repeated."
        ),
    ],
    json: Annotated[Path, typer.Option(help="Where the result goes.")],
    model: ModelOption = None,
    setting: Annotated[
        Where,
        typer.Option(
            help="Whether the question is inside the compressed prompt (aware) or comes after it "
            "(agnostic); nll and agreement have no question and are always agnostic."
        ),
    ] = Where.BOTH,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 2000,
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each task and setting.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of numbers, places and windows.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 text that prompts are cut from; by default Python's own help topics."
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Samples that run together in nll and agreement.")
    ] = 4,
    continuation: Annotated[
        int, typer.Option(min=1, help="Tokens that nll scores after each prompt.")
    ] = 256,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Measure policies on tasks, beside the full cache, and write a JSON file.

    The same options give the same samples. Each finished sample is kept in FILE.partial at once: a
    run that was interrupted goes on from there when it is started again.
    """
    from kv_serve.evaluate.plan import SETTINGS, Plan
    from kv_serve.evaluate.specs import read_specs
    from kv_serve.tasks import default_text, read_text

    with refusing(ValueError):
        plan = Plan(
            policies=read_specs(policy),
            tasks=tuple(dict.fromkeys(t.value for t in task)),
            settings=tuple(s for s in SETTINGS if setting in (s, Where.BOTH)),
            length=length,
            samples=samples,
            seed=seed,
            batch=batch,
            continuation=continuation,
        )
        source = default_text() if text is None else read_text(text)
    check_writable(json)
    expect_backend(backend)
    _evaluate(load_model(model, dtype, device), plan, source, json, backend)


def _evaluate(loaded: "LoadedModel", plan: "Plan", text: "Text", path: Path, backend: str) -> None:
    from kv_serve.evaluate.journal import open_journal
    from kv_serve.evaluate.provenance import commit, versions
    from kv_serve.evaluate.report import Report, rows

    make, served = caches_by(loaded, backend)
    code, under = commit(), versions()
    partial = path.with_name(path.name + ".partial")
    measured = {"commit": code, "versions": under, "attention": str(served)}
    settings = plan.identity(loaded, text) | measured
    journal, sentence = open_journal(partial, settings)
    if sentence:
        remark(sentence)
    try:
        _run(loaded, plan, text, journal, make)
    except KeyboardInterrupt:
        remark(
            f"Interrupted. {len(journal)} samples are finished and kept in {partial}; run the same "
            "command again to go on from there."
        )
        raise typer.Exit(INTERRUPTED) from None
    found = rows(plan, journal)
    report = Report(model=loaded.name, commit=code, versions=under, attention=served, rows=found)
    report.write(path)
    journal.remove()
    _show(found)
    remark(f"Written to {path}.")


def _run(
    loaded: "LoadedModel", plan: "Plan", text: "Text", journal: "Journal", make: "MakeCache"
) -> None:
    from kv_serve.evaluate.runner import run

    total = len(plan.pairs) * len(plan.policies) * plan.samples
    with refusing(ValueError), progress() as shown:
        bar = shown.add_task("making the samples", total=total)
        for entry in run(loaded, plan, text, journal, make):
            words = f"{entry.task}, {entry.setting}: {entry.policy}"
            shown.update(bar, advance=1, description=words)


def _show(rows: "Sequence[Row]") -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("policy", "task", "setting"):
        table.add_column(name)
    for name in ("score", "full", "KV bytes", "of full", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            escape(row.policy),
            row.task,
            row.setting,
            f"{row.score:.3f}",
            f"{row.full_score:.3f}",
            f"{row.kv_bytes:,.0f}",
            f"{row.kv_bytes / row.full_bytes:.3f}",
            f"{row.seconds:.1f}",
        )
    out().print(table)
