"""Statistics of noise, for fitting a basis to the weights of a tiny model."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kv_policy import Calibrated
from kv_svd import Calibration
from kv_transformers import cache_shape
from kv_transformers.layers import stored_layers
from kv_transformers.models.folder import fingerprint
from kv_transformers.modules import attention_modules


def write_statistics(folder: Path, path: Path, seed: int = 0) -> Path:
    """Write statistics of random queries, keys and values, and a model's output projections."""
    made = AutoModelForCausalLM.from_pretrained(folder)
    shape = cache_shape(made)
    modules = attention_modules(made, stored_layers(made)).values()
    output = [getattr(each, "o_proj", None) or each.out_proj for _, each in modules]
    found = Calibration(shape, torch.stack([each.weight.detach() for each in output]))
    draw = torch.Generator().manual_seed(seed)
    for layer in range(shape.layers):
        query = torch.randn(1, shape.kv_heads, shape.group, 300, shape.key_dim, generator=draw)
        key = torch.randn(1, shape.kv_heads, 300, shape.key_dim, generator=draw)
        value = torch.randn(1, shape.kv_heads, 300, shape.value_dim, generator=draw)
        found.see(layer, query, key, value)
    own = fingerprint(folder)
    found.write(path, Calibrated(model="tiny", fingerprint=own, text="noise", digest="0"))
    return path
