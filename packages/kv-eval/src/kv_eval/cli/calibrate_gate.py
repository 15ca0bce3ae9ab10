"""`kv-serve calibrate gate`: fit a gate to KVzip's scores of a model."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_eval.cli.collecting import collect_windows
from kv_transformers.cli.console import (
    INTERRUPTED,
    check_writable,
    out,
    progress,
    refusing,
    remark,
    writing,
)
from kv_transformers.cli.options import DeviceOption, Dtype, DtypeOption, ModelOption, load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kv_eval.calibrate.partial import Partial
    from kv_eval.calibrate.passages import Passage
    from kv_eval.calibrate.repeated import Repetitions
    from kv_policy import ScoreCalibrator, ScoreEvaluation
    from kv_transformers.models import LoadedModel

POLICY: Final = "gate"
EVERY: Final = 8  # windows between checkpoints, which hold the sampled tokens
SHARES: Final = (0.5, 0.25, 0.125)  # kept shares at which the overlap is measured


def gate(
    out_file: Annotated[
        Path, typer.Option("--out", help="Output file of the gate, for gate:file=FILE.")
    ],
    model: ModelOption = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A UTF-8 text to read; may be repeated. By default documentation and source code "
            "of Python, and generated dialogues and records."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens to read of all texts, at least 4096.")
    ] = 27_000,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the model repeats at once; by default 900, or half of its context.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:
    """Let the model repeat texts, and fit what predicts which tokens it needs for that.

    The state is saved in FILE.partial every few windows: run the same command again to resume after
    an interruption. The last part of each text is left out of the fit, and shows how many of the
    tokens that KVzip keeps the gate keeps as well.
    """
    from kv_eval.calibrate.passages import default_passages, read_passage
    from kv_eval.calibrate.repeated import Repetitions

    with refusing(ValueError):
        repetitions = Repetitions(tokens, window)
        passages = tuple(map(read_passage, text)) if text else default_passages()
    check_writable(out_file, "--out")
    loaded = load_model(model, dtype, device)
    _calibrate(loaded, repetitions, passages, out_file, as_json)


def _calibrate(
    loaded: "LoadedModel",
    repetitions: "Repetitions",
    passages: "Sequence[Passage]",
    path: Path,
    as_json: bool,
) -> None:
    from dataclasses import replace

    from kv_eval.calibrate.partial import Partial
    from kv_eval.evaluate.provenance import commit
    from kv_policy import Calibrated, load_score_calibrator
    from kv_policy.installing import versions
    from kv_transformers import cache_shape
    from kv_transformers.rotary import find_ropes

    with refusing(ValueError):
        windows, others = repetitions.windows(loaded, passages)
        shape = cache_shape(loaded.model)
        ropes = find_ropes(loaded.model, shape, "gate")
        instruction = len(repetitions.instruction(loaded))
        calibration = load_score_calibrator(POLICY)(replace(shape, rope=ropes), instruction)
    settings = repetitions.identity(loaded, passages) | {"commit": commit(), **versions()}
    partial = Partial(path.with_name(path.name + ".partial"), settings)
    total = len(windows) * repetitions.window_of(loaded)
    collect_windows(loaded, calibration, windows, partial, "repeating", total, EVERY)
    _fit(calibration, partial)
    evaluations = _evaluated(loaded, calibration, others, partial)
    facts = Calibrated(
        loaded.name,
        loaded.fingerprint,
        " ".join(passage.name for passage in passages),
        " ".join(passage.digest for passage in passages),
    )
    with writing(path, f"; the collected state is saved in {partial.path}"):
        calibration.write(path, facts, repetitions.window_of(loaded), evaluations.values())
    partial.remove()
    _show(path, calibration.tokens, partial.seconds, evaluations, shape.layers, as_json)


def _fit(calibration: "ScoreCalibrator", partial: "Partial") -> None:
    began = time.perf_counter()
    try:
        with refusing(ValueError), progress() as shown:
            bar = shown.add_task("fitting", total=1.0)
            for done in calibration.fit():
                shown.update(bar, completed=done)
    except KeyboardInterrupt:
        raise _interrupted(partial) from None
    partial.seconds += time.perf_counter() - began


def _interrupted(partial: "Partial") -> typer.Exit:
    remark(
        f"Interrupted. The collected state is saved in {partial.path}; run the same command again "
        "to resume."
    )
    return typer.Exit(INTERRUPTED)


def _evaluated(
    loaded: "LoadedModel",
    calibration: "ScoreCalibrator",
    others: "dict[str, Tensor]",
    partial: "Partial",
) -> "dict[str, ScoreEvaluation]":
    """Evaluate the gate on a window of each text that it was not fitted on."""
    from kv_eval.calibrate.collect import show

    evaluations = {}
    try:
        with refusing(ValueError), progress() as shown:
            bar = shown.add_task("comparing with KVzip", total=len(others))
            for name, window in others.items():
                evaluations[name] = calibration.evaluation()
                show(loaded, evaluations[name], window)
                shown.update(bar, advance=1)
    except KeyboardInterrupt:
        raise _interrupted(partial) from None
    return evaluations


def _show(
    path: Path,
    tokens: int,
    seconds: float,
    evaluations: "dict[str, ScoreEvaluation]",
    layers: int,
    as_json: bool,
) -> None:
    """Print tokens, seconds, and the overlap with KVzip by text and by layer."""
    each = {
        name: {f"{share:g}": evaluation.overlap(share) for share in SHARES}
        for name, evaluation in evaluations.items()
    }
    by_layer = [
        {
            f"{share:g}": sum(j.overlap(share, slice(i, i + 1)) for j in evaluations.values())
            / len(evaluations)
            for share in SHARES
        }
        for i in range(layers)
    ]
    if as_json:
        found = {
            "file": str(path),
            "bytes": path.stat().st_size,
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "overlap": each,
            "overlap_by_layer": by_layer,
        }
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title="Of the tokens KVzip keeps, the gate keeps",
        title_justify="left",
    )
    table.add_column("")
    for share in SHARES:
        table.add_column(f"of {share:.1%}", justify="right")
    rows = [*each.items(), *((f"layer {i}", found) for i, found in enumerate(by_layer))]
    for name, overlaps in rows:
        table.add_row(name, *(f"{overlaps[f'{share:g}']:.1%}" for share in SHARES))
    out().print(table)
    remark(f"Read {tokens:,} tokens in {seconds:.1f} s, {path.stat().st_size:,} bytes.")
    remark(f"Written to {path}; use it as gate:file={path},keep=25%.")
