"""Statistics of a tiny model, as the policies with a basis read them."""

from pathlib import Path

import torch

from kv_policy import Calibrated, load_calibrator
from kv_transformers import cache_shape, passing
from kv_transformers.collecting import CollectingCache, output_projections
from kv_transformers.models import LoadedModel


def write(loaded: LoadedModel, path: Path, fingerprint: str) -> Path:
    """Write statistics of a short text of any characters."""
    model = loaded.model
    shape = cache_shape(model)
    calibrator = load_calibrator("zack")(shape, output_projections(model, shape))
    ids = torch.randint(4, 90, (1, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        seen = CollectingCache(model, calibrator)
        model.base_model(input_ids=ids, **passing(model.base_model, seen), use_cache=True)
    calibrator.write(path, Calibrated("tiny", fingerprint, "noise", "-"))
    return path
