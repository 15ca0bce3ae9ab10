"""How much a policy with a basis may remove before a model reads held-out text worse."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from _evaluation import CONSOLE
from _zack_size import Size
from torch.nn.functional import cross_entropy

from kv_eval.tasks import default_text
from kv_transformers import CompressedCache, passing
from kv_transformers.from_text import FULL
from kv_transformers.models import LoadedModel

FITTED: Final = ("zack", "svd-kv", "kq-svd", "palu", "think")


def placed(spec: str, file: Path) -> str:
    """A policy with the file its basis comes from."""
    parts = []
    for part in spec.split("+"):
        name, _, options = part.partition(":")
        path = str(file).replace("+", r"\+").replace(",", r"\,")
        given = f"file={path}," if name in FITTED else ""
        parts.append(f"{name}:{given}{options}".rstrip(",:"))
    return "+".join(parts)


def nats(loaded: LoadedModel, spec: str, size: Size) -> tuple[float, float, float]:
    """Nats per token of held-out windows under a policy, dimensions removed, bytes held."""
    model, ids = loaded.model, loaded.tokenizer.encode(default_text().body, verbose=False)
    stride = (len(ids) - size.length) // max(1, size.windows - 1)
    windows = torch.tensor([ids[i * stride :][: size.length] for i in range(size.windows)])
    cache = None if spec == FULL else CompressedCache(model, spec)
    with torch.inference_mode():
        out = model(windows, **passing(model, cache), use_cache=cache is not None)
    value = cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten())
    if cache is None:
        return float(value), 0.0, 1.0
    bases, report = cache.runtime.bases, cache.memory()
    assert bases is not None
    kept = sum(map(sum, (*bases.key_dims, *bases.value_dims)))
    shape = cache.runtime.shape
    whole = shape.layers * shape.kv_heads * (shape.key_dim + shape.value_dim)
    return float(value), 1 - kept / whole, report.ratio


def rates(loaded: LoadedModel, size: Size, path: Path) -> list[dict[str, object]]:
    """Nats at many rates, and the greatest rate that keeps them within 1 %."""
    full, _, _ = nats(loaded, FULL, size)
    rows: list[dict[str, object]] = [{"kind": "rate", "policy": FULL, "nats": full, "removed": 0.0}]
    for method in size.methods:
        low, high = 0.0, 0.5
        for i in range(size.halvings + 2):
            # The ends first: what a rotation alone costs, and a point far out for the curve.
            rate = (0.0, 0.25, (low + high) / 2)[min(i, 2)]
            name, _, options = method.partition(":")
            spec = f"{name}:rate={rate}" + (f",{options}" if options else "")
            value, removed, held = nats(loaded, placed(spec, path), size)
            good = value <= full * 1.01
            row = {"kind": "rate", "method": method, "policy": spec, "nats": value}
            rows.append({**row, "removed": removed, "bytes": held, "within": good})
            CONSOLE.print(f"{spec}: {value:.4f} nats, {removed:.3f} removed")
            low, high = (max(low, rate), high) if good else (low, min(high, rate))
    return rows


def greatest(rows: Sequence[dict[str, object]], method: str) -> float:
    """The greatest share that a method removed within 1 %; 0 if there is none."""
    mine = [row for row in rows if row.get("method") == method and row["within"]]
    return max((float(str(row["removed"])) for row in mine), default=0.0)
