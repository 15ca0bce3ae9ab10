"""Errors of attention outputs under formats, by the rotation before them, on SmolLM2-135M.

Keys and values of a text are encoded and decoded in the coordinates of each basis, and the last
queries attend to them; an error is that of the outputs of a layer's heads, relative to their norm,
as a mean over layers. Means and pairs are of docstrings, the text is of Python's help topics.
Beside `hadamard` are matrices that were not chosen: with random signs, in blocks of 16 dimensions,
and a random rotation. Scales of channels are of values, and of keys too.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import _result
import torch
from _zack import docstrings, statistics
from method_figures import Seen, prompt_of
from rich.console import Console
from torch import Tensor

from kv_policy import CacheShape, Codec, HeadBasis, LayerBasis, TokenFormat, parse, tier_formats
from kv_svd import spreading
from kv_transformers import cache_shape, passing
from kv_transformers.collecting import CollectingCache
from kv_transformers.models import LoadedModel, load_model

CONSOLE: Final = Console(stderr=True)
TOKENS: Final = 512
ASKING: Final = 64  # last queries
FORMATS: Final = {
    "k4v4": "k4v4",
    "k4v2": "k4v2",
    "outliers": "k4v4:outliers=1",
    "bfp": "k4v4:levels=bfp,group=16",
}
BLOCK: Final = 16

Bind = Callable[[int, CacheShape], LayerBasis]
Row = dict[str, object]


def fixed(matrix: Tensor) -> Bind:
    """Rotate all heads, whose keys and values have equal widths, by a matrix."""

    def bind(layer: int, shape: CacheShape) -> LayerBasis:
        turn = matrix.float().expand(shape.kv_heads, -1, -1)
        maps = HeadBasis(turn, (shape.key_dim,) * shape.kv_heads)
        return LayerBasis(maps, maps)

    return bind


def bases(dim: int, file: Path) -> Mapping[str, Bind]:
    """Return all bases by name."""
    draw = torch.Generator().manual_seed(0)
    signs = 2 * torch.randint(2, (dim, 1), generator=draw) - 1
    noise = torch.randn(dim, dim, generator=draw, dtype=torch.float64)
    found: dict[str, Bind] = {"plain": lambda layer, shape: LayerBasis()}
    for name, spec in (
        ("hadamard", "hadamard"),
        ("centred", f"hadamard:file={file}"),
        ("pair", f"hadamard:file={file},pair=true"),
        ("scaled", f"channel-scale:file={file}"),
        ("scaled_keys", f"channel-scale:file={file},keys=true"),
    ):
        basis = parse(spec).basis
        assert basis is not None
        found[name] = basis.bind
    blocks = torch.kron(torch.eye(dim // BLOCK, dtype=torch.float64), spreading(BLOCK))
    return found | {
        "signs": fixed(spreading(dim) * signs),
        "blocks": fixed(blocks),
        "random": fixed(torch.linalg.qr(noise).Q),
    }


def stored(codec: Codec, maps: HeadBasis | None, x: Tensor) -> Tensor:
    """Return what is stored of vectors, in coordinates."""
    found = x if maps is None else maps.project(x)
    return codec.decode(codec.encode(found.reshape(-1, 1, codec.dim))).float().reshape(found.shape)


def attended(
    form: TokenFormat | None, basis: LayerBasis, seen: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the outputs of the last queries over a text, stored in a format or exactly."""
    query, key, value = seen
    asking = query[..., -ASKING:, :]
    later = torch.ones(ASKING, key.shape[2], dtype=torch.bool).triu(key.shape[2] - ASKING + 1)
    if form is not None:
        key, value = stored(form.key, basis.key, key), stored(form.value, basis.value, value)
        asking = asking if basis.key is None else basis.key.project_queries(asking)
    logits = asking @ key[:, :, None].mT * query.shape[-1] ** -0.5
    out = logits.masked_fill(later, -torch.inf).softmax(-1) @ value[:, :, None]
    return out if form is None or basis.value is None else basis.value.undo(out)


def errors(loaded: LoadedModel, tokens: int, file: Path) -> Iterator[Row]:
    """Measure every basis under every format."""
    seen, shape = Seen(), cache_shape(loaded.model)
    cache = CollectingCache(loaded.model, seen)
    with torch.inference_mode():
        loaded.model.base_model(
            input_ids=prompt_of(loaded, tokens),
            **passing(loaded.model.base_model, cache),
            use_cache=True,
        )
        layers = [*zip(seen.query, seen.key, seen.value, strict=True)]
        exact = [attended(None, LayerBasis(), each) for each in layers]
        for form, spec in FORMATS.items():
            (coded,) = tier_formats(parse(spec), shape)
            for name, bind in bases(shape.key_dim, file).items():
                off = [
                    float((attended(coded, bind(i, shape), each) - exact[i]).norm())
                    / float(exact[i].norm())
                    for i, each in enumerate(layers)
                ]
                yield {"kind": "error", "format": form, "basis": name, "error": sum(off) / len(off)}


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    return {f"{row['format']}_{row['basis']}": float(str(row["error"])) for row in rows}


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    loaded = load_model(progress=CONSOLE.print)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.safetensors"
        for done in statistics(loaded, docstrings(), 256 if quick else 2048, file):
            CONSOLE.print(f"{done:,} tokens read for statistics")
        rows = [*errors(loaded, 128 if quick else TOKENS, file)]
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:20} {value:.4f}")
    _result.write("rotation_errors", summary, rows, quick=quick)


if __name__ == "__main__":
    main()
