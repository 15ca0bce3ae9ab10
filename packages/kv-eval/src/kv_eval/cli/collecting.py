"""Collecting a calibration's statistics on the console: resume, progress, interruption."""

from typing import TYPE_CHECKING, Final

import typer

from kv_transformers.cli.console import INTERRUPTED, progress, refusing, remark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kv_eval.calibrate.partial import Partial
    from kv_policy import Resumable
    from kv_transformers.models import LoadedModel

EVERY: Final = 2  # windows between checkpoints


def collect_windows(
    loaded: "LoadedModel",
    calibrator: "Resumable",
    windows: "Sequence[Tensor]",
    partial: "Partial",
    what: str,
    total: int,
    every: int = EVERY,
) -> None:
    """Resume from the checkpoint if there is one, and read the remaining windows.

    Args:
        loaded: the model.
        calibrator: accumulates every layer's vectors.
        windows: token ids of all windows, each 1 x L.
        partial: the checkpoint.
        what: the verb that the progress bar shows.
        total: tokens that the calibrator will have accumulated.
        every: windows between two checkpoints.

    Raises:
        typer.Exit: the model or the checkpoint is refused, or the user interrupted.
    """
    from kv_eval.calibrate.collect import collect

    with refusing(ValueError):
        sentence = partial.resume(calibrator)
    if sentence:
        remark(sentence)
    try:
        with refusing(ValueError), progress() as shown:
            bar = shown.add_task(what, total=total, completed=calibrator.tokens)
            for done in collect(loaded, calibrator, windows, partial, every):
                shown.update(bar, completed=done)
    except KeyboardInterrupt:
        kept = f"is saved in {partial.path}" if partial.path.exists() else "is not saved yet"
        remark(
            f"Interrupted. The state after whole windows {kept}; run the same command again "
            "to resume."
        )
        raise typer.Exit(INTERRUPTED) from None
