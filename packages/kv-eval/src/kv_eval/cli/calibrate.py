"""`kv-serve calibrate`: find a policy's settings for a model and write them to a file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_eval.cli.calibrate_gate import gate
from kv_eval.cli.calibrate_heads import heads
from kv_eval.cli.calibrate_levels import levels
from kv_eval.cli.calibrate_zack import zack
from kv_eval.cli.eval import Task
from kv_eval.cli.shares import share
from kv_eval.extras import undrawable
from kv_transformers.cli.console import (
    INTERRUPTED,
    check_writable,
    err,
    out,
    progress,
    refuse,
    refusing,
    remark,
    writing,
)
from kv_transformers.cli.options import (
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
    from kv_eval.calibrate.grid import Setting
    from kv_eval.calibrate.search import Point, Search
    from kv_eval.evaluate.journal import Journal
    from kv_eval.tasks import Text
    from kv_transformers.from_text import MakeCache
    from kv_transformers.models import LoadedModel

app = typer.Typer(no_args_is_help=True, help="Find a policy's settings for a model.")
NOTHING_FOUND = 1


@app.callback()
def _start() -> None:
    """Find a policy's settings for a model, by measuring their cost on tasks."""


app.command("gate")(gate)
app.command("heads")(heads)
app.command("levels")(levels)
app.command("zack")(zack)


@app.command("leankv")
def leankv(
    out_file: Annotated[
        Path, typer.Option("--out", help="Output file of the profile, for leankv:profile=FILE.")
    ],
    model: ModelOption = None,
    task: Annotated[
        list[Task] | None,
        typer.Option(help="Tasks to measure the loss on; by default needle, multikey and nll."),
    ] = None,
    max_loss: Annotated[
        str,
        typer.Option(
            help="Allowed loss per task: 0 for nothing beyond noise, 0.05 or 5% for 5 % of the "
            "full cache's score."
        ),
    ] = "0",
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help="High and low format, such as k8v4/k4v2 or k8v4/drop; may be repeated. By "
            "default k8v4/k4v2, k4v2/k4v1, k8v8/k8v4 and k8v4/drop."
        ),
    ] = None,
    t_high: Annotated[
        str, typer.Option(help="Shares of attention not stored in the high format.")
    ] = "0.5%,1%,5%,10%,20%",
    t_low: Annotated[
        str, typer.Option(help="Shares of attention that are pruned.")
    ] = "0,0.1%,0.5%,1%",
    window: Annotated[int, typer.Option(min=0, help="Newest tokens, kept raw.")] = 64,
    last: Annotated[
        int, typer.Option(min=0, help="Last queries of a prompt to observe; 0: all.")
    ] = 64,
    length: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = 2000,
    samples: Annotated[int, typer.Option(min=1, help="Prompts per task.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of numbers, depths and windows.")] = 0,
    continuation: Annotated[
        int, typer.Option(min=1, help="Tokens that nll scores after each prompt.")
    ] = 64,
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text to cut prompts from; by default Python's own help topics."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Output file of a plot, as PNG.")] = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Try LeanKV's formats and thresholds, and write the cheapest within the allowed loss.

    A prompt is read once for several settings. Each finished sample is saved in FILE.partial at
    once: run the same command again to resume after an interruption.
    """
    from kv_eval.calibrate.grid import PAIRS, grid
    from kv_eval.calibrate.search import Search
    from kv_eval.tasks import default_text, read_text
    from kv_transformers.from_text import read_spec

    with refusing(ValueError):
        allowed = share("--max-loss", max_loss)
        settings = grid(
            tuple(map(_pair, pair)) if pair else PAIRS,
            _shares("--t-high", t_high),
            _shares("--t-low", t_low),
            window=window,
            last=last or None,
        )
        for setting in settings:
            read_spec(setting.spec)
        named = task or [Task.NEEDLE, Task.MULTIKEY, Task.NLL]
        search = Search(
            settings,
            tuple(dict.fromkeys(t.value for t in named)),
            length=length,
            samples=samples,
            seed=seed,
            continuation=continuation,
        )
        source = default_text() if text is None else read_text(text)
    check_writable(out_file, "--out")
    if plot is not None:
        check_writable(plot, "--plot")
        if os.path.realpath(plot) == os.path.realpath(out_file):
            refuse(f"--plot and --out both name {plot}; use another file for the plot")
        reason = undrawable("--plot")
        if reason is not None:
            refuse(reason)
    expect_backend(backend)
    loaded = load_model(model, dtype, device)
    _calibrate(loaded, search, source, allowed, out_file, plot, backend)


def _calibrate(
    loaded: "LoadedModel",
    search: "Search[Setting]",
    text: "Text",
    allowed: float,
    path: Path,
    plot: Path | None,
    backend: str,
) -> None:
    from kv_eval.calibrate.plot import draw
    from kv_eval.calibrate.search import choose, write_profile
    from kv_eval.evaluate.journal import open_journal
    from kv_eval.evaluate.provenance import commit
    from kv_policy.installing import versions

    make, served = caches_by(loaded, backend)
    partial = path.with_name(path.name + ".partial")
    measured = {"commit": commit(), "attention": str(served), **versions()}
    identity = search.plans[0].identity(loaded, text) | measured
    with refusing(ValueError):
        journal, sentence = open_journal(partial, identity)
    if sentence:
        remark(sentence)
    try:
        _run(loaded, search.baseline, text, journal, make)
        hopeless = search.unanswered(journal)
        if hopeless is not None:
            refuse(
                f"the full cache answers none of {search.samples} samples of {hopeless} right, so "
                "no loss can be measured; remove that task, or use shorter prompts"
            )
        _run(loaded, search, text, journal, make)
    except KeyboardInterrupt:
        remark(
            f"Interrupted. {len(journal)} samples are finished and saved in {partial}; run the "
            "same command again to resume."
        )
        raise typer.Exit(INTERRUPTED) from None
    points = search.points(journal)
    chosen = choose(points, allowed)
    kept = f"; the samples are saved in {partial}, and the same command resumes from them"
    if plot is not None:
        with writing(plot, kept):
            draw(plot, points, chosen, f"leankv on {loaded.name}")
    if chosen is not None:
        with writing(path, kept):
            write_profile(path, chosen, loaded.name, loaded.fingerprint, allowed, search.length)
        journal.remove()
    _show(points, chosen)
    if plot is not None:
        remark(f"Plot written to {plot}.")
    if chosen is None:
        nearest = min(points, key=lambda p: p.worst)
        err().print(
            f"No setting loses {allowed:.1%} or less on every task; the nearest loses "
            f"{nearest.worst:.1%} and keeps {nearest.ratio:.1%} of the bytes. Allow more, or try "
            f"other formats. No profile is written; the samples are saved in {partial}.",
            soft_wrap=True,
        )
        raise typer.Exit(NOTHING_FOUND)
    remark(f"Written to {path}; use it as leankv:profile={path}.")


def _run(
    loaded: "LoadedModel",
    search: "Search[Setting]",
    text: "Text",
    journal: "Journal",
    make: "MakeCache",
) -> None:
    with refusing(ValueError), progress() as shown:
        bar = shown.add_task("creating the samples", total=search.total)
        for entry in search.run(loaded, text, journal, make):
            shown.update(bar, advance=1, description=entry.task)


def _show(points: "tuple[Point[Setting], ...]", chosen: "Point[Setting] | None") -> None:
    from rich.markup import escape
    from rich.table import Table

    from kv_eval.calibrate.search import frontier

    tasks = tuple(points[0].losses)
    table = Table(box=None, padding=(0, 2, 0, 0), title="The frontier", title_justify="left")
    for name in ("", "high", "low"):
        table.add_column(name)
    for name in ("t_high", "t_low", "of full", *(f"{t} lost" for t in tasks)):
        table.add_column(name, justify="right")
    shown = frontier(points)
    if chosen is not None and chosen not in shown:
        shown.append(chosen)
    for point in sorted(shown, key=lambda p: p.ratio):
        setting = point.setting
        table.add_row(
            "chosen" if point is chosen else "",
            escape(setting.high),
            escape(setting.low),
            f"{setting.t_high:.1%}",
            f"{setting.t_low:.1%}",
            f"{point.ratio:.3f}",
            *(f"{found.share:.1%}" for found in point.losses.values()),
        )
    out().print(table)


def _pair(text: str) -> tuple[str, str]:
    high, slash, low = text.partition("/")
    if not (high and slash and low):
        raise ValueError(
            f"--pair {text} is not a pair of formats; write the high and the low one with a slash "
            "between, such as k8v4/k4v2 or k8v4/drop"
        )
    return high, low


def _shares(name: str, text: str) -> tuple[float, ...]:
    return tuple(share(name, piece) for piece in text.split(","))
