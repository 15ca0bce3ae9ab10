"""`kv-serve demo`: a real model with compressed caches, in a table."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_transformers.cli.console import check_writable, err, out, refusing, remark, writing
from kv_transformers.cli.options import BackendOption, caches_by, expect_backend, load_model

if TYPE_CHECKING:
    from rich.table import Table

    from kv_eval.demo import Demo

WIDTH: Final = 100  # maximum width of the output, in columns


def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the table to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use a much shorter prompt.")] = False,
    backend: BackendOption = "auto",
) -> None:
    """Let SmolLM2 find a hidden number and chat, with a full cache and compressed ones."""
    if json is not None:
        check_writable(json)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kv_eval.demo import LENGTH, QUICK_LENGTH, TURNS, Outcome, Show, caches
    from kv_eval.tasks import default_text
    from kv_runtime import AUTO, remedy

    expect_backend(backend)
    length = QUICK_LENGTH if quick else LENGTH
    loaded = load_model(None)
    make, served = caches_by(loaded, backend)
    with refusing(ValueError):
        show = Show(loaded, default_text(), length)
    console = out()
    width = min(console.width, WIDTH)
    console.print(
        f"The number {show.sample.answers[0]} is hidden in a text of {show.sample.length:,} "
        "tokens, and SmolLM2 is asked for it. Then a two-turn chat with one cache: "
        f"{' '.join(TURNS)}\n",
        highlight=False,
        width=width,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    outcomes: list[Outcome] = []
    specs = caches(length, loaded.fingerprint)
    with Progress(*columns, console=err(), transient=True) as progress:
        bar = progress.add_task(specs[0], total=len(specs))
        for spec in specs:
            progress.update(bar, description=spec)
            outcomes += show.run((spec,), make, remark)
            progress.advance(bar)
    report = show.report(tuple(outcomes), str(served))
    if json is not None:
        with writing(json):
            report.write(json)
    timed = served.instructions is not None
    console.print(_table(report, timed=timed), width=width)
    held = "KV bytes: cache bytes after the long prompt, including pages, windows and tables."
    if timed:
        ms = f"ms: per token generated after it; compressed caches attend by {served}."
        console.print(f"{held} {ms}", style="dim", highlight=False, width=width)
    else:
        # Next to torch's attention over a full cache, times would tell nothing about a kernel.
        left_out = f"Times are omitted: no native kernel attends here, but {served}."
        console.print(f"{held} {left_out}", style="dim", highlight=False, width=width)
        if backend == AUTO and loaded.model.device.type == "cpu":
            console.print(f"To do: {remedy('cpu')}", highlight=False, soft_wrap=True, markup=False)
    console.print("\nNext:", highlight=False)
    for command in next_commands(_program()):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


def next_commands(program: str) -> tuple[str, ...]:
    """Return three example commands, as they can be typed where the demo was called."""
    from kv_eval.demo import CHOSEN

    policies = ("--policy", "k8v4,k4v2")
    return tuple(
        shlex.join([program, *words])
        for words in (
            ("generate", "--policy", CHOSEN, "Who was Napoleon?"),
            ("eval", *policies, "--task", "needle", "--samples", "2", "--json", "needle.json"),
            ("policies", "kv-compress"),
        )
    )


def _program() -> str:
    """Return the program name as typed: bare if on the path, else as called."""
    typed = sys.argv[0]
    found = shutil.which(Path(typed).name)
    absolute = Path(typed).is_absolute()
    return Path(typed).name if absolute and found and Path(found) == Path(typed) else typed


def _table(report: "Demo", *, timed: bool) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("cache", no_wrap=True)
    for name in ("hidden number", "chat"):
        table.add_column(name)
    for name in ("KV bytes", "of full", *(["ms/token"] if timed else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in report.outcomes:
        table.add_row(
            escape(outcome.policy),
            _judged(outcome.needle, outcome.needle_right),
            _judged(outcome.chat, outcome.chat_right),
            f"{outcome.kv_bytes:,}",
            f"{outcome.ratio:.3f}",
            *([f"{outcome.token_ms:.0f}"] if timed else []),
        )
    return table


def _judged(answer: str, right: bool) -> str:
    from rich.markup import escape

    mark = "[green]right[/]" if right else "[red]wrong[/]"
    return f"{mark}: {escape(answer) or '(nothing)'}"
