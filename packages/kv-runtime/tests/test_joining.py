"""Sequences that come and go over one pool hold and see what each holds and sees alone."""

import random

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool
from kv_policy import KVPolicy, parse
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE

POLICIES = (
    "k8v4",
    "k8v4:window=8",
    "k4v4:keys=channel,block=16,window=4",
    "snapkv:budget=12,window=4+k8v4",
    "h2o:budget=12",
    "streaming:budget=12",
    "kv-compress:rate=2,floor=12",
    "leankv:window=4",
)
POISON = 0xFF


class Sequence:
    """A sequence's tokens in all layers, and a cache of its own that it is compared with."""

    def __init__(self, policy: KVPolicy, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.alone = PolicyCache(policy, SHAPE, backend="torch")

    def tokens(self, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        def made(*lead: int) -> Tensor:
            return torch.randn(1, SHAPE.kv_heads, *lead, generator=self.draw).to(SHAPE.dtype)

        group, key, value = SHAPE.group, SHAPE.key_dim, SHAPE.value_dim
        return [
            (made(group, count, key), made(count, key), made(count, value))
            for _ in range(SHAPE.layers)
        ]

    def run(self, tokens: list[tuple[Tensor, Tensor, Tensor]], **how: bool) -> list[Tensor]:
        self.alone.begin(torch.ones(1, tokens[0][0].shape[3], dtype=torch.bool), **how)
        return [self.alone.attend(i, *fresh, 0.4) for i, fresh in enumerate(tokens)]


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_a_shared_pool_makes_no_difference(text: str, seed: int) -> None:
    policy, draw = parse(text), random.Random(seed)
    size = PolicyCache(policy, SHAPE, backend="torch").layout.page_bytes
    memory = torch.full((800, size), POISON, dtype=torch.uint8)
    pool = PagePool.over(memory, poison=True)

    def begin(sequence: Sequence) -> PolicyCache:
        cache = PolicyCache(policy, SHAPE, backend="torch", pool=pool)
        pieces = [draw.randint(1, 30) for _ in range(draw.randint(1, 3))]
        for piece, count in enumerate(pieces):
            tokens = sequence.tokens(count)
            how = {"prompt": True, "remaining": len(pieces) - piece - 1}
            wanted = sequence.run(tokens, **how)
            cache.begin(torch.ones(1, count, dtype=torch.bool), **how)
            for layer, fresh in enumerate(tokens):
                torch.testing.assert_close(cache.attend(layer, *fresh, 0.4), wanted[layer])
        return cache

    there: list[Sequence] = []
    running: PolicyCache | None = None
    for _ in range(5):
        if not there or draw.random() < 0.4:
            there.append(Sequence(policy, draw.getrandbits(32)))
            fresh = begin(there[-1])
            if running is None:
                running = fresh
            else:
                running.join(fresh)
        assert running is not None
        for _ in range(draw.randint(0, 6)):
            bring = [draw.random() < 0.8 for _ in there]
            tokens = [each.tokens(1) for each in there]
            running.begin(torch.tensor(bring)[:, None], prompt=False)
            found = [
                running.attend(i, *(torch.cat(x) for x in zip(*fresh, strict=True)), 0.4)
                for i, fresh in enumerate(zip(*tokens, strict=True))
            ]
            for row, (each, fresh) in enumerate(zip(there, tokens, strict=True)):
                if bring[row]:
                    wanted = each.run(fresh, prompt=False)
                    for layer, out in enumerate(wanted):
                        torch.testing.assert_close(found[layer][row : row + 1], out)
        kept = [i for i in range(len(there)) if draw.random() < 0.8]
        there = [there[i] for i in kept]
        if kept:
            running.select(torch.tensor(kept))
            assert running.batch is not None
            held = [each.alone.memory().pages_used for each in there]
            if running.batch.window is None:  # whose pages are not in the pool of a cache alone
                assert running.batch.pages_used().tolist() == held
        else:
            running.release()
            running = None
            assert pool.used == 0
    if running is not None:
        running.release()
    assert pool.used == 0
    assert bool((memory[:-1] == POISON).all())
