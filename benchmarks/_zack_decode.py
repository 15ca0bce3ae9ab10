"""A decoding step of one layer whose heads keep fewer dimensions, beside one that keeps all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from _timing import Work, timed
from torch import Tensor

from kv_attention import Attended
from kv_policy import CacheShape, HeadBasis, KVPolicy, LayerBasis, Part, parse
from kv_runtime import PolicyCache
from kv_runtime.attention import attended

SHAPES = {  # of one layer
    "SmolLM2-135M": CacheShape(1, 3, 3, 64, 64),
    "Llama-3.1-8B": CacheShape(1, 8, 4, 128, 128),
}


@dataclass(frozen=True)
class Ranks(Part):
    """Rotations at random that keep of each head what is said: as fast as those of a real basis."""

    name: ClassVar[str] = "ranks"
    key: str = ""  # of the heads, with hyphens between them
    value: str = ""

    @property
    def basis(self) -> "Ranks":
        """This policy is a basis."""
        return self

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        """Give the rotations, the same for all layers."""
        return LayerBasis(
            _rotations(self.key, shape.key_dim), _rotations(self.value, shape.value_dim)
        )

    @classmethod
    def of(cls, key: Sequence[int], value: Sequence[int]) -> "Ranks":
        """Write the ranks down."""
        return cls("-".join(map(str, key)), "-".join(map(str, value)))


def _rotations(text: str, dim: int) -> HeadBasis:
    rank = tuple(map(int, text.split("-")))
    generator = torch.Generator().manual_seed(0)
    whole = torch.linalg.qr(torch.randn(len(rank), dim, dim, generator=generator)).Q
    kept = torch.arange(max(rank)) < torch.tensor(rank)[:, None]
    return HeadBasis(whole[..., : max(rank)] * kept[:, None], rank)


@dataclass(frozen=True)
class Case:
    """The ranks of a layer's heads, and where they come from."""

    ranks: str  # uniform, or adaptive
    rate: float  # that was asked for, of the whole cache
    key: tuple[int, ...]
    value: tuple[int, ...]
    layer: int | None = None  # of the real model, whose ranks these are


def decode_rows(
    name: str, cases: Sequence[Case], batch: int, tokens: int, rounds: int
) -> list[dict[str, object]]:
    """Time attention of a decoding step in all cases and over raw pages, turn by turn."""
    shape = SHAPES[name]
    raw, *reduced = (
        _begun(policy, shape, batch, tokens)
        for policy in (parse("raw"), *(Ranks.of(case.key, case.value) for case in cases))
    )
    work = {str(i): _attention(cache, batch) for i, cache in enumerate((raw, *reduced))}
    turns = timed(work, rounds)
    full = turns.median("0")
    maps = timed(
        {
            f"{i}-{what}": do
            for i, cache in enumerate(reduced, 1)
            for what, do in _maps(cache, batch).items()
        },
        rounds,
        repeats=20,
    )
    rows = []
    for i, (case, cache) in enumerate(zip(cases, reduced, strict=True), 1):
        project, undo = maps.median(f"{i}-project"), maps.median(f"{i}-undo")
        low, ratio, high = turns.quartiles((str(i),), ("0",))
        rows.append(
            {
                "kind": "decode",
                "model": name,
                "batch": batch,
                "tokens": tokens,
                "ranks": case.ranks,
                "rate": case.rate,
                "layer": case.layer,
                "key_ranks": case.key,
                "value_ranks": case.value,
                "groups_of_heads": len(cache.layout.shapes),
                "rounds": rounds,
                "full_s": full,
                "reduced_s": turns.median(str(i)),
                "project_s": project,
                "undo_s": undo,
                "decode_ratio": ratio,
                "decode_ratio_quartiles": (low, high),
                "decode_ratio_with_maps": ratio + (project + undo) / full,
                "memory_ratio": cache.memory().ratio / raw.memory().ratio,
            }
        )
    return rows


def _begun(policy: KVPolicy, shape: CacheShape, batch: int, tokens: int) -> PolicyCache:
    """A cache of random tokens at the beginning of a decoding step."""
    cache = PolicyCache(policy, shape, backend="torch")
    cache.begin(torch.ones(batch, tokens, dtype=torch.bool))
    key, value = _stored(cache, batch, tokens)
    cache.keep(0, key, value, Attended(value[:, :, None]))
    cache.begin(torch.ones(batch, 1, dtype=torch.bool))
    return cache


def _stored(cache: PolicyCache, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Random keys and values as the cache stores them: what a head does not keep is zero."""
    shape, bases = cache.layout.shape, cache.bases
    ranks = (None, None) if bases is None else (bases.key_dims[0], bases.value_dims[0])
    found = []
    for dim, rank in zip((shape.key_dim, shape.value_dim), ranks, strict=True):
        x = torch.randn(batch, shape.kv_heads, tokens, dim)
        if rank is not None:
            x *= (torch.arange(dim) < torch.tensor(rank)[:, None])[:, None]
        found.append(x.to(shape.dtype))
    return found[0], found[1]


def _attention(cache: PolicyCache, batch: int) -> Work:
    """Attention of one token a sequence over the pages and itself; nothing is stored."""
    shape = cache.layout.shape
    query = torch.randn(batch, shape.kv_heads, shape.group, 1, shape.key_dim).to(shape.dtype)
    key, value = _stored(cache, batch, 1)
    scale = cache.shape.key_dim**-0.5
    held, now, fresh = cache.batch, cache._pass, (query, key, value)
    assert held is not None
    assert now is not None
    return lambda: attended(held, now.whole, 0, fresh, scale, (cache.observe,), cache.backend)


def _maps(cache: PolicyCache, batch: int) -> dict[str, Work]:
    """What is mapped for one token a sequence where nothing is folded."""
    bases, shape, stored = cache.bases, cache.shape, cache.layout.shape
    assert bases is not None
    heads = batch, shape.kv_heads
    query = torch.randn(*heads, shape.group, 1, shape.key_dim).to(shape.dtype)
    key, value = (torch.randn(*heads, 1, shape.key_dim).to(shape.dtype) for _ in range(2))
    out = torch.randn(*heads, shape.group, 1, stored.value_dim).to(shape.dtype)
    return {
        "project": lambda: (bases.queries(0, query), bases.keys(0, key), bases.values(0, value)),
        "undo": lambda: bases.undone(0, out, shape.value_dim),
    }
