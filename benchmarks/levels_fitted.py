"""Formats of 3 and 4 bits with levels fitted to the model, beside even steps.

Levels are those of `kv-serve calibrate levels`, fitted to docstrings of Python's standard library,
with and without an outlier of each vector kept apart. They are written to
`results/levels_fitted.model.statistics`, which a later run reads again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from _methods import LENGTH, Size, run
from _zack import docstrings

from kv_eval.calibrate.collect import WINDOW, show
from kv_policy import Calibrated
from kv_quant.level_calibration import LevelCalibration
from kv_transformers import cache_shape
from kv_transformers.models import LoadedModel

TOKENS: Final = 16384
POLICIES: Final[Mapping[str, str]] = {
    "k4v4": "k4v4",
    "fitted_k4v4": "k4v4:levels=fitted,file=FILE",
    "k3v3": "k3v3",
    "fitted_k3v3": "k3v3:levels=fitted,file=FILE",
    "outliers_k3v3": "k3v3:outliers=1",
    "outliers_fitted_k3v3": "k3v3:outliers=1,levels=fitted,file=FILE",
}
QUICK: Final = ("k4v4", "outliers_fitted_k3v3")


def fit(loaded: LoadedModel, file: Path, size: Size) -> None:
    """Write the levels that are fitted to the beginning of a text."""
    text, tokens = docstrings(), TOKENS if size.length == LENGTH else 512
    ids = loaded.tokenizer.encode(text.body, add_special_tokens=False, verbose=False)[:tokens]
    calibration = LevelCalibration(cache_shape(loaded.model))
    for window in torch.tensor([ids]).split(WINDOW, 1):
        show(loaded, calibration, window)
    facts = Calibrated(loaded.name, loaded.fingerprint, text.name, text.digest)
    calibration.write(file, facts)


if __name__ == "__main__":
    run("levels_fitted", __doc__, POLICIES, QUICK, fit)
