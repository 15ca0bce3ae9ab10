"""The summary of a calibration, as a table or as JSON."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from kv_transformers.cli.console import out, remark

if TYPE_CHECKING:
    from kv_policy import Calibrated, Calibrator

REMOVALS: Final = (0.01, 0.05, 0.1)  # of singular values


def show(
    calibrator: "Calibrator", facts: "Calibrated", seconds: float, path: Path, as_json: bool
) -> None:
    """Print tokens, seconds, median dimensions, the rate if any, and bytes."""
    size = path.stat().st_size
    dimensions = {removal: calibrator.dimensions(removal) for removal in REMOVALS}
    if as_json:
        found = {
            "file": str(path),
            "bytes": size,
            "model": facts.model,
            "fingerprint": facts.fingerprint,
            "text": facts.text,
            "tokens": calibrator.tokens,
            "seconds": round(seconds, 3),
            "median_dimensions": {str(removal): each for removal, each in dimensions.items()},
            "rate": facts.rate,
            "max_loss": facts.max_loss,
            "tasks": facts.tasks,
        }
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("tokens", f"{calibrator.tokens:,}")
    table.add_row("seconds", f"{seconds:.1f}")
    for removal, each in dimensions.items():
        words = ", ".join(f"{name} {count:g}" for name, count in each.items())
        table.add_row(f"median dimensions without {removal:.0%} of the singular values", words)
    if facts.rate is not None:
        table.add_row("rate", f"{facts.rate:.4f}")
    table.add_row("bytes", f"{size:,}")
    out().print(table)
    rate = "" if facts.rate is not None else ",keep=70%"
    remark(f"Written to {path}; use it as zack:file={path}{rate}.")
