"""Scores of a model's heads in a file, for policies that read one."""

from pathlib import Path

from kv_eval.calibrate.collect import show
from kv_eval.calibrate.random_tokens import RandomTokens, digest
from kv_evict.heads_calibration import HeadsCalibration
from kv_policy import Calibrated
from kv_transformers import cache_shape
from kv_transformers.models import LoadedModel


def head_scores(loaded: LoadedModel, file: Path, drawn: RandomTokens | None = None) -> None:
    """Write the scores that `kv-serve calibrate heads` writes."""
    drawn = drawn or RandomTokens()
    windows = drawn.drawn(loaded)
    calibration = HeadsCalibration(cache_shape(loaded.model), drawn.period_of(loaded))
    for window in windows:
        show(loaded, calibration, window)
    facts = Calibrated(loaded.name, loaded.fingerprint, drawn.name, digest(windows))
    calibration.write(file, facts)
