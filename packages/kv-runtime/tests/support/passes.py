"""The same random passes over caches, and what they must agree on."""

import torch
from torch import Tensor

from kv_policy import KVPolicy
from kv_runtime import PolicyCache
from tiered_policies import SHAPE
from tiered_world import one, ragged


class Passes:
    """The same random passes over any cache."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def over(self, caches: list[PolicyCache], valid: Tensor) -> list[list[Tensor]]:
        """Run one pass on each cache; return the outputs by cache and layer."""
        found: list[list[Tensor]] = [[] for _ in caches]
        rows, width = valid.shape
        for cache in caches:
            cache.begin(valid)
        for layer in range(SHAPE.layers):
            query = torch.randn(rows, 2, 2, width, 6, generator=self.generator)
            key = torch.randn(rows, 2, width, 6, generator=self.generator)
            value = torch.randn(rows, 2, width, 5, generator=self.generator)
            for cache, outs in zip(caches, found, strict=True):
                outs.append(cache.attend(layer, query, key, value, 0.4))
        return found


def filled(policy: KVPolicy, lengths: tuple[int, ...], steps: int, seed: int = 1) -> PolicyCache:
    cache, passes = PolicyCache(policy, SHAPE, page_tokens=4), Passes(seed)
    passes.over([cache], ragged(*lengths))
    for _ in range(steps):
        passes.over([cache], one(len(lengths)))
    return cache


def expect_alike(caches: list[PolicyCache], seed: int, *, near: float = 0.0) -> None:
    """Compare the attention of caches in steps and a further turn, and what they hold then."""
    passes, rows = Passes(seed), caches[0].sequences
    assert rows is not None
    for valid in (one(rows), ragged(*range(3, 3 + rows)), *(one(rows),) * 4):
        first, *others = passes.over(caches, valid)
        for other in others:
            torch.testing.assert_close(other, first, rtol=near, atol=near)
    tokens = [cache.memory().tokens for cache in caches]
    assert all(torch.equal(each, tokens[0]) for each in tokens)
    for cache in caches:
        assert cache.batch is not None
        cache.batch.pool.check(cache.batch.pages())
