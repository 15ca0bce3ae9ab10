"""`kv-serve calibrate zack`: collect a model's statistics, and search a rate on tasks."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_eval.cli.calibrate_summary import show
from kv_eval.cli.collecting import collect_windows
from kv_eval.cli.eval import Task
from kv_eval.cli.shares import share
from kv_transformers.cli.console import (
    INTERRUPTED,
    check_writable,
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
    from collections.abc import Iterable

    from kv_eval.calibrate.collect import Reading
    from kv_eval.calibrate.rate import Rate, RateSearch
    from kv_eval.calibrate.search import Search
    from kv_eval.tasks import Text
    from kv_policy import Calibrated, Calibrator
    from kv_transformers.models import LoadedModel

NOTHING_FOUND: Final = 1
POLICY: Final = "zack"
ENOUGH: Final = 16384  # tokens; benchmarks/zack_quality.py measures the loss with fewer


def zack(
    out_file: Annotated[
        Path, typer.Option("--out", help="Output file of the statistics, for zack:file=FILE.")
    ],
    model: ModelOption = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text to read; by default Python's own help topics."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to read, at least 4096.")] = ENOUGH,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window; by default 2048, or the model's context length if smaller.",
            show_default=False,
        ),
    ] = None,
    together: Annotated[
        int,
        typer.Option(help="KV heads concatenated in the statistics, for policies such as palu."),
    ] = 1,
    max_loss: Annotated[
        str | None,
        typer.Option(
            help="Also search the highest rate at which no task loses more: 1% or 0.01 of the full "
            "cache's score, or noise.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        list[Task] | None,
        typer.Option(help="With --max-loss: by default needle, multikey and nll."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="With --max-loss: tokens per prompt (default 2000)."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="With --max-loss: prompts per task (default 10).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="With --max-loss: seed of the prompts (default 0).")
    ] = None,
    continuation: Annotated[
        int | None, typer.Option(min=1, help="With --max-loss: tokens scored by nll (default 64).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Read a text, and write the statistics for zack, svd-kv, kq-svd, palu and think.

    The state is saved in FILE.partial every few windows: run the same command again to resume after
    an interruption.
    """
    from kv_eval.calibrate.collect import Reading
    from kv_eval.tasks import default_text, read_text

    with refusing(ValueError):
        reading = Reading(tokens, window, together)
        allowed = None if max_loss is None else share("--max-loss", max_loss)
        search = _samples(
            task,
            {"length": length, "samples": samples, "seed": seed, "continuation": continuation},
            allowed,
        )
        source = default_text() if text is None else read_text(text)
    check_writable(out_file, "--out")
    if tokens < ENOUGH:
        remark(
            f"{tokens:,} tokens are few; beyond about {ENOUGH:,}, more of the same text changes "
            "bases little."
        )
    expect_backend(backend)
    loaded = load_model(model, dtype, device)
    calibrator, seconds = _collect(loaded, reading, source, out_file)
    facts = _write(loaded, calibrator, source, out_file)
    status = 0
    if allowed is not None:
        found = _search(loaded, calibrator, reading, search, source, out_file, allowed, backend)
        status = 0 if found.found else NOTHING_FOUND
        facts = _with_rate(facts, found, calibrator, out_file)
    _partial(out_file).unlink(missing_ok=True)
    show(calibrator, facts, seconds, out_file, as_json)
    if status:
        raise typer.Exit(status)


def _samples(
    task: list[Task] | None, sizes: dict[str, int | None], allowed: float | None
) -> "Search[Rate]":
    """Return the samples of a rate search, if there is one."""
    from kv_eval.calibrate.search import Search

    given = {name: size for name, size in sizes.items() if size is not None}
    if allowed is None and (task or given):
        names = ", ".join(f"--{name}" for name in (["task"] if task else []) + list(given))
        raise ValueError(f"{names} was given without --max-loss; set the allowed loss, such as 1%")
    named = task or [Task.NEEDLE, Task.MULTIKEY, Task.NLL]
    return Search((), tuple(dict.fromkeys(t.value for t in named)), **given)


def _collect(
    loaded: "LoadedModel", reading: "Reading", text: "Text", path: Path
) -> "tuple[Calibrator, float]":
    from kv_eval.calibrate.partial import Partial
    from kv_eval.evaluate.provenance import commit
    from kv_policy import load_calibrator
    from kv_policy.installing import versions
    from kv_transformers import cache_shape
    from kv_transformers.collecting import output_projections

    with refusing(ValueError):
        windows = reading.windows(loaded, text)
        shape = cache_shape(loaded.model)
        weights = output_projections(loaded.model, shape)
        calibrator = load_calibrator(POLICY)(shape, weights, reading.together)
    settings = reading.identity(loaded, text) | {"commit": commit(), **versions()}
    partial = Partial(_partial(path), settings)
    total = sum(each.shape[1] for each in windows)
    collect_windows(loaded, calibrator, windows, partial, "reading", total)
    return calibrator, partial.seconds


def _write(
    loaded: "LoadedModel", calibrator: "Calibrator", text: "Text", path: Path
) -> "Calibrated":
    from kv_policy import Calibrated

    facts = Calibrated(loaded.name, loaded.fingerprint, text.name, text.digest)
    with writing(path, f"; the collected state is saved in {_partial(path)}"):
        calibrator.write(path, facts)
    return facts


def _search(
    loaded: "LoadedModel",
    calibrator: "Calibrator",
    reading: "Reading",
    samples: "Search[Rate]",
    text: "Text",
    path: Path,
    allowed: float,
    backend: str,
) -> "RateSearch":
    from kv_eval.calibrate.rate import LEVELS, RateSearch
    from kv_eval.evaluate.journal import open_journal
    from kv_eval.evaluate.provenance import commit
    from kv_policy.installing import versions

    search = RateSearch(POLICY, path, calibrator.rates(LEVELS), samples, allowed)
    if not search.levels:
        return search
    make, served = caches_by(loaded, backend)
    measured = {"commit": commit(), "attention": str(served), **versions()}
    identity: dict[str, object] = {**samples.plans[0].identity(loaded, text), **measured}
    identity["read"] = reading.identity(loaded, text)
    with refusing(ValueError):
        journal, sentence = open_journal(path.with_name(path.name + ".samples.partial"), identity)
    if sentence:
        remark(sentence)
    baseline = samples.baseline
    try:
        _run(baseline.run(loaded, text, journal, make), baseline.total)
        hopeless = baseline.unanswered(journal)
        if hopeless is not None:
            refuse(
                f"the full cache answers none of {samples.samples} samples of {hopeless} right, so "
                f"no loss can be measured; remove that task, or use shorter prompts. {path} "
                "is written, without a rate"
            )
        _run(search.run(loaded, text, journal, make), search.total)
    except KeyboardInterrupt:
        remark(
            f"Interrupted. {path} is written, without a rate. {len(journal)} samples are saved in "
            f"{journal.path}; run the same command again to resume."
        )
        raise typer.Exit(INTERRUPTED) from None
    journal.remove()
    return search


def _with_rate(
    facts: "Calibrated", search: "RateSearch", calibrator: "Calibrator", path: Path
) -> "Calibrated":
    if not search.levels:
        remark(
            f"No rate can be tried: heads as small as this model's have no dimensions to remove "
            f"for {POLICY} by default. {path} is written, without a rate."
        )
        return facts
    if search.found is None:
        least = min(search.tried, key=lambda point: point.worst, default=None)
        nearest = "" if least is None else f"; the lowest loss tried is {least.worst:.1%}"
        remark(
            f"No rate loses {search.allowed:.1%} or less on every task{nearest}. {path} is "
            "written, without a rate."
        )
        return facts
    found = replace(
        facts,
        rate=search.found.setting.rate,
        max_loss=search.allowed,
        tasks=tuple(search.samples.tasks),
    )
    with writing(path, "; it is unchanged, without the rate"):
        calibrator.write(path, found)
    return found


def _run(entries: "Iterable[object]", total: int) -> None:
    with refusing(ValueError), progress() as shown:
        bar = shown.add_task("creating the samples", total=total)
        for entry in entries:
            shown.update(bar, advance=1, description=getattr(entry, "task", ""))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
