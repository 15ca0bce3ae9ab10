"""Random head scores in files."""

from pathlib import Path

import torch

from kv_evict.heads_file import KINDS, Facts, HeadScores, save


def scores_of(layers: int, heads: int, seed: int = 0) -> HeadScores:
    """Return random scores of a model with so many layers and KV heads."""
    draw = torch.Generator().manual_seed(seed)
    facts = Facts(
        model="made up",
        fingerprint="0123456789abcdef",
        text="-",
        digest="-",
        tokens=1,
        period=16,
        layers=layers,
        heads=heads,
    )
    return HeadScores(facts, {kind: torch.rand(layers, heads, generator=draw) for kind in KINDS})


def written(path: Path, layers: int, heads: int, seed: int = 0) -> str:
    """Write random scores, and return the path as text."""
    save(path, scores_of(layers, heads, seed))
    return str(path)
