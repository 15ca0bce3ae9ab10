"""Calibrating for benchmarks of bases: texts that every Python has, and how far bases differ."""

import ast
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from operator import add
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from kv_eval.calibrate.collect import WINDOW
from kv_eval.tasks import Text
from kv_policy import Calibrated, load_calibrator
from kv_svd.fit import Moments, rotation
from kv_svd.statistics import Statistics
from kv_transformers import cache_shape, passing
from kv_transformers.collecting import CollectingCache, output_projections
from kv_transformers.models import LoadedModel


@cache
def docstrings() -> Text:
    """The prose in the docstrings of Python's standard library; nothing of it is imported."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        if "test" in str(path.relative_to(folder)) or "site-packages" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
        texts = (ast.get_docstring(node) for node in nodes)
        found += [" ".join(part.split()) for text in texts if text for part in text.split("\n\n")]
    prose = [p for p in dict.fromkeys(found) if len(p) > 80 and p[-1] == "."]
    return Text("python-docstrings", tuple(prose))


def statistics(
    loaded: LoadedModel, text: Text, tokens: int, path: Path, together: int = 1
) -> Iterator[int]:
    """Read the beginning of a text and write what was learnt; give the tokens read so far."""
    ids = loaded.tokenizer.encode(text.body, add_special_tokens=False, verbose=False)[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"{text.name} has {len(ids):,} tokens; {tokens:,} were asked for")
    shape = cache_shape(loaded.model)
    weights = output_projections(loaded.model, shape)
    calibrator = load_calibrator("zack")(shape, weights, together)
    for window in torch.tensor([ids]).split(WINDOW, 1):
        cache_ = CollectingCache(loaded.model, calibrator)
        with torch.no_grad():
            loaded.model.base_model(
                input_ids=window, **passing(loaded.model.base_model, cache_), use_cache=True
            )
        yield calibrator.tokens
    calibrator.write(path, Calibrated(loaded.name, loaded.fingerprint, text.name, text.digest))


Pairs: TypeAlias = Mapping[str, Sequence[Moments]]


def pairs(*found: Statistics) -> Pairs:
    """The stacked moments that ZACK's bases are of, by layer; of several texts as of one."""
    by_layer = list(zip(*found, strict=True))
    return {
        "Q-K": [reduce(add, (x.query + x.keys for x in layers)) for layers in by_layer],
        "V-O": [reduce(add, (x.values for x in layers), layers[0].output) for layers in by_layer],
    }


def drift(first: Pairs, second: Pairs, ranks: Mapping[str, Tensor]) -> dict[str, float]:
    """How much worse bases of one text serve another than that text's own do.

    `excess` is the share of the other text's energy (sum of squares) that the first text's
    subspaces lose beyond what the best of equal rank lose: it is what storing with the wrong basis
    costs, and does not mind how directions turn among themselves inside what is kept. `turned` is
    the share of a subspace's dimensions that lie outside of the other, |P - P'|² / 2r. `elements`
    is the paper's measure (Tables 4 and 5): mean absolute difference of the rotations' elements
    over their mean absolute value, signs aligned; it counts turns that lose nothing.
    """
    sums: dict[str, list[Tensor]] = {}
    for pair, rank in ranks.items():
        for layer, (a, b) in enumerate(zip(first[pair], second[pair], strict=True)):
            left, right = rotation(a).matrix, rotation(b).matrix
            kept = torch.arange(left.shape[2]) < rank[layer][:, None]
            mine_kept, own_kept = left * kept[:, None], right * kept[:, None]
            energy = b.total.diagonal(dim1=1, dim2=2).sum(1)

            def captured(basis: Tensor, total: Tensor = b.total) -> Tensor:
                return (basis * (total @ basis)).sum((1, 2))

            sign = (left * right).sum(1, keepdim=True).sign()
            overlap = (mine_kept.mT @ own_kept).square().sum((1, 2))
            each = {
                "excess": (captured(own_kept) - captured(mine_kept)) / energy,
                "turned": 1 - overlap / rank[layer],
                "elements": (left * sign - right).abs().mean((1, 2)) / left.abs().mean((1, 2)),
            }
            for name, value in each.items():
                sums.setdefault(f"{pair} {name}", []).append(value)
    return {name: float(torch.cat(values).mean()) for name, values in sums.items()}
