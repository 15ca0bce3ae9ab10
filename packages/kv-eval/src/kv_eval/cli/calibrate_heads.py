"""`kv-serve calibrate heads`: find the KV heads of a model that retrieve."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_eval.cli.collecting import collect_windows
from kv_transformers.cli.console import check_writable, out, refusing, remark, writing
from kv_transformers.cli.options import DeviceOption, Dtype, DtypeOption, ModelOption, load_model

if TYPE_CHECKING:
    from kv_eval.calibrate.random_tokens import RandomTokens
    from kv_policy import HeadCalibrator
    from kv_transformers.models import LoadedModel

CALIBRATION: Final = "heads"


def heads(
    out_file: Annotated[
        Path, typer.Option("--out", "-o", help="Output file of the scores, for razor:file=FILE.")
    ],
    model: ModelOption = None,
    period: Annotated[
        int | None,
        typer.Option(
            help="Random tokens that a window repeats; by default 512, or a quarter of the "
            "model's context if that is smaller.",
            show_default=False,
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows to read, each of its own tokens.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:
    """Let the model read random tokens four times, and score which heads look them up again.

    The scores are for razor, duo and headkv. The state is saved in FILE.partial every few windows:
    run the same command again to resume after an interruption.
    """
    from kv_eval.calibrate.random_tokens import RandomTokens

    with refusing(ValueError):
        drawn = RandomTokens(period, windows, seed)
    check_writable(out_file, "--out")
    _calibrate(load_model(model, dtype, device), drawn, out_file, as_json)


def _calibrate(loaded: "LoadedModel", drawn: "RandomTokens", path: Path, as_json: bool) -> None:
    from kv_eval.calibrate.partial import Partial
    from kv_eval.calibrate.random_tokens import digest
    from kv_eval.evaluate.provenance import commit
    from kv_policy import Calibrated, load_head_calibrator
    from kv_policy.installing import versions
    from kv_transformers import cache_shape

    with refusing(ValueError):
        windows = drawn.drawn(loaded)
        shape = cache_shape(loaded.model)
        calibrator = load_head_calibrator(CALIBRATION)(shape, drawn.period_of(loaded))
    settings = drawn.identity(loaded) | {"commit": commit(), **versions()}
    partial = Partial(path.with_name(path.name + ".partial"), settings)
    total = sum(window.shape[1] for window in windows)
    collect_windows(loaded, calibrator, windows, partial, "reading", total)
    facts = Calibrated(loaded.name, loaded.fingerprint, drawn.name, digest(windows))
    with writing(path, f"; the collected state is saved in {partial.path}"):
        calibrator.write(path, facts)
    partial.remove()
    _show(path, calibrator, partial.seconds, as_json)


def _show(path: Path, calibrator: "HeadCalibrator", seconds: float, as_json: bool) -> None:
    """Print the best head of each layer by each kind of score."""
    scores = {kind: each.tolist() for kind, each in calibrator.scores().items()}
    if as_json:
        found = {
            "file": str(path),
            "bytes": path.stat().st_size,
            "tokens": calibrator.tokens,
            "seconds": round(seconds, 3),
            "scores": scores,
        }
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title="The highest score of a layer's KV heads",
        title_justify="left",
    )
    table.add_column("layer", justify="right")
    for kind in scores:
        table.add_column(kind, justify="right")
    for layer, each in enumerate(zip(*scores.values(), strict=True)):
        table.add_row(str(layer), *(f"{max(heads):.3f}" for heads in each))
    out().print(table)
    remark(f"Read {calibrator.tokens:,} tokens in {seconds:.1f} s, {path.stat().st_size:,} bytes.")
    remark(f"Written to {path}; use it as razor:file={path}.")
