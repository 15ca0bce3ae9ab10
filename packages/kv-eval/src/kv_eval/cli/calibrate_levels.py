"""`kv-serve calibrate levels`: fit the levels of codes to a model's keys and values."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_eval.cli.collecting import collect_windows
from kv_transformers.cli.console import check_writable, out, refusing, remark, writing
from kv_transformers.cli.options import DeviceOption, Dtype, DtypeOption, ModelOption, load_model

if TYPE_CHECKING:
    from kv_eval.calibrate.collect import Reading
    from kv_eval.tasks import Text
    from kv_policy import LevelCalibrator
    from kv_transformers.models import LoadedModel

CALIBRATION: Final = "levels"
OUTLIERS: Final = (0, 1)


def levels(
    out_file: Annotated[
        Path,
        typer.Option("--out", help="Output file of the levels, for k4v4:levels=fitted,file=FILE."),
    ],
    model: ModelOption = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text to read; by default Python's own help topics."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to read, at least 4096.")] = 16384,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window; by default 2048, or the model's context length if smaller.",
            show_default=False,
        ),
    ] = None,
    outliers: Annotated[
        list[int] | None,
        typer.Option(
            help="Elements of each vector that are kept apart; may be repeated, and levels are "
            "fitted for each. By default 0 and 1.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:
    """Read a text, and fit what codes of 4, 3, 2 and 1 bits stand for.

    An element counts as much as its error would move the outputs of attention. The state is saved
    in FILE.partial every few windows: run the same command again to resume after an interruption.
    """
    from kv_eval.calibrate.collect import Reading
    from kv_eval.tasks import default_text, read_text

    apart = tuple(sorted(set(outliers))) if outliers else OUTLIERS
    with refusing(ValueError):
        reading = Reading(tokens, window)
        source = default_text() if text is None else read_text(text)
    check_writable(out_file, "--out")
    _calibrate(load_model(model, dtype, device), reading, source, apart, out_file, as_json)


def _calibrate(
    loaded: "LoadedModel",
    reading: "Reading",
    text: "Text",
    outliers: tuple[int, ...],
    path: Path,
    as_json: bool,
) -> None:
    from kv_eval.calibrate.partial import Partial
    from kv_eval.evaluate.provenance import commit
    from kv_policy import Calibrated, load_level_calibrator
    from kv_policy.installing import versions
    from kv_transformers import cache_shape

    with refusing(ValueError):
        windows = reading.windows(loaded, text)
        shape = cache_shape(loaded.model)
        calibrator = load_level_calibrator(CALIBRATION)(shape, outliers)
    settings = reading.identity(loaded, text) | {"outliers": [*outliers], "commit": commit()}
    partial = Partial(path.with_name(path.name + ".partial"), settings | versions())
    total = sum(each.shape[1] for each in windows)
    collect_windows(loaded, calibrator, windows, partial, "reading", total)
    facts = Calibrated(loaded.name, loaded.fingerprint, text.name, text.digest)
    with writing(path, f"; the collected state is saved in {partial.path}"):
        calibrator.write(path, facts)
    partial.remove()
    _show(path, calibrator, partial.seconds, as_json)


def _show(path: Path, calibrator: "LevelCalibrator", seconds: float, as_json: bool) -> None:
    """Print what the levels lose, beside even steps."""
    errors = calibrator.errors()
    if as_json:
        found = {
            "file": str(path),
            "bytes": path.stat().st_size,
            "tokens": calibrator.tokens,
            "seconds": round(seconds, 3),
            "errors": [asdict(each) for each in errors],
        }
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title="Estimated error of attention, from keys and from values",
        title_justify="left",
    )
    for name in ("outliers", "bits", "keys", "even", "values", "even"):
        table.add_column(name, justify="right")
    for each in errors:
        shown = (each.keys, each.even_keys, each.values, each.even_values)
        table.add_row(str(each.outliers), str(each.bits), *(f"{x:.4f}" for x in shown))
    out().print(table)
    remark(f"Read {calibrator.tokens:,} tokens in {seconds:.1f} s, {path.stat().st_size:,} bytes.")
    beside = errors[0].outliers
    more = f",outliers={beside}" if beside else ""
    remark(f"Written to {path}; use it as k4v4:levels=fitted{more},file={path}.")
