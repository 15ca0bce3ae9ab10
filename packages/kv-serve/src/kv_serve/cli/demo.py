"""`kv-serve demo`: a real model answering from compressed caches, in a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_serve.cli.console import check_writable, err, out, refusing, remark, writing
from kv_serve.cli.options import BackendOption, caches_by, expect_backend, load_model

if TYPE_CHECKING:
    from rich.table import Table

    from kv_serve.demo import Demo


def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the table to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use a much shorter prompt.")] = False,
    backend: BackendOption = "auto",
) -> None:
    """Watch SmolLM2 find a hidden number and chat, from a full cache and four compressed ones."""
    if json is not None:
        check_writable(json)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kv_serve.demo import LENGTH, QUICK_LENGTH, TURNS, Outcome, Show, caches
    from kv_serve.tasks import default_text

    expect_backend(backend)
    length = QUICK_LENGTH if quick else LENGTH
    loaded = load_model(None)
    make, served = caches_by(loaded, backend)
    with refusing(ValueError):
        show = Show(loaded, default_text(), length)
    console = out()
    console.print(
        f"The number {show.sample.answers[0]} is hidden in a text of {show.sample.length:,} "
        "tokens, and SmolLM2 is asked for it. Then a chat, both turns in one cache: "
        f"{' '.join(TURNS)}",
        highlight=False,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    outcomes: list[Outcome] = []
    specs = caches(length)
    with Progress(*columns, console=err(), transient=True) as progress:
        bar = progress.add_task(specs[0], total=len(specs))
        for spec in specs:
            progress.update(bar, description=spec)
            outcomes += show.run((spec,), make, remark)
            progress.advance(bar)
    report = show.report(tuple(outcomes))
    if json is not None:
        with writing(json):
            report.write(json)
    console.print(_table(report))
    console.print(
        "KV bytes: held by the cache after the long prompt, with pages, windows and tables. "
        f"ms: for each token generated behind it; compressed caches attend by {served}.",
        style="dim",
        highlight=False,
    )


def _table(report: "Demo") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("cache", "hidden number", "chat"):
        table.add_column(name)
    for name in ("KV bytes", "of full", "ms/token"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in report.outcomes:
        table.add_row(
            escape(outcome.policy),
            _judged(outcome.needle, outcome.needle_right),
            _judged(outcome.chat, outcome.chat_right),
            f"{outcome.kv_bytes:,}",
            f"{outcome.ratio:.3f}",
            f"{outcome.token_ms:.0f}",
        )
    return table


def _judged(answer: str, right: bool) -> str:
    from rich.markup import escape

    mark = "[green]right[/]" if right else "[red]wrong[/]"
    return f"{mark}: {escape(answer) or '(nothing)'}"
