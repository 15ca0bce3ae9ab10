"""Drafts of decoding requests: each attends as if decoded alone, and wrong ones leave no trace."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool
from kv_policy import KVPolicy, compose, parse
from kv_runtime import PolicyCache, RequestBatch, RequestRows, RequestStep
from tiered_policies import SHAPE, Exact, Turned

SCALE, CHUNK, LONGEST = 0.4, 7, 48
HEADS = SHAPE.kv_heads * SHAPE.group
PROMPTS = {"a": 19, "b": 6, "c": 11}
RAGGED = Turned("6253", "154")  # each head of each layer has ranks of its own
POLICIES: dict[str, KVPolicy] = {
    "raw": parse("raw"),
    "window": parse("k4v2:window=5"),
    "wide-window": parse("k4v2:window=32"),  # no token leaves it
    "selector": parse("snapkv:budget=12,window=4+k4v2"),
    "short-window": parse("keydiff:keep=50%+k4v2:window=3"),
    "merged": parse("d2o:budget=9,every=0+k8v4"),
    "blocks": parse("k4v4:keys=channel,block=16"),
    "blocks-window": compose(parse("snapkv:budget=14,window=4"), Exact(1, 5, block=4)),
    "ranks": compose(parse("lagkv:keep=50%"), Exact(1, 5), RAGGED),
    "ranks-blocks": compose(Exact(1, 5, block=4), RAGGED),
}


@dataclass
class Engine:
    """Prefills in chunks, then decodes with drafts; what is right is drawn beforehand.

    `pages` is the size of the pool; `readers` further layers attend to each layer's keys.
    """

    policy: KVPolicy
    backend: str = "torch"
    readers: int = 0
    seed: int = 0
    told: dict[str, Exception] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROMPTS, 0))
    accepted: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        self.draw, noise = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        sizes = (HEADS, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.key_dim)
        sizes = (*sizes, (SHAPE.kv_heads, SHAPE.value_dim))
        self.noise = noise
        self.tokens = {
            name: [torch.randn(SHAPE.layers, LONGEST, *size, generator=noise) for size in sizes]
            for name in PROMPTS
        }

    @cached_property
    def pool(self) -> PagePool:
        size = PolicyCache(self.policy, SHAPE).layout.page_bytes
        return PagePool.over(torch.full((600, size), 255, dtype=torch.uint8), poison=True)

    @cached_property
    def batch(self) -> RequestBatch:
        given = {"backend": self.backend, "pool": self.pool, "careful": True}
        return RequestBatch(PolicyCache(self.policy, SHAPE, **given), SCALE, self.told.__setitem__)

    def brought(self, name: str, tokens: int, right: int) -> list[Tensor]:
        """The vectors of a request's next tokens, of which the first `right` are right."""
        done = self.computed[name]
        found = [x[:, done : done + tokens].clone() for x in self.tokens[name]]
        for x in found:
            x[:, right:] = torch.randn(x[:, right:].shape, generator=self.noise)
        return found

    def step(self, *names: str, most: int = 3, padded: bool = False, **more: object) -> dict:
        """Do a step of requests with up to `most` drafts; give what right tokens see, by layer."""
        steps, start, vectors, rights = {}, [0], [], {}
        for key, name in enumerate(names):
            done, prompt = self.computed[name], PROMPTS[name]
            drafts, right = 0, 0
            if done < prompt:
                count = min(CHUNK, prompt - done)
                drafts = most if padded and done + count == prompt else 0
            else:
                count = 1
                drafts = self.draw.randint(0, most)
                right = self.draw.randint(0, drafts)
            steps[key] = RequestStep(
                name, done, count + drafts, prompt, serial=key, drafts=drafts, **more
            )
            vectors.append(self.brought(name, count + drafts, count + right))
            start.append(start[-1] + count + drafts)
            rights[name] = count + right
            self.accepted, self.rejected = self.accepted + right, self.rejected + drafts - right
        self.batch.begin(steps, ())
        rows, outs = RequestRows(tuple(steps), tuple(start)), []
        for layer in range(SHAPE.layers):
            given = [torch.cat([x[i][layer] for x in vectors]) for i in range(3)]
            for left in range(self.readers, -1, -1):
                outs.append(torch.full((start[-1], HEADS, SHAPE.value_dim), torch.nan))
                self.batch.attend(layer, rows, *given, outs[-1], more=left > 0)
        self.batch.end()
        whole = torch.stack(outs)
        assert bool(whole.isfinite().all())
        assert not self.told
        for name, right in rights.items():
            self.computed[name] += right
        return {name: whole[:, start[i] : start[i] + rights[name]] for i, name in enumerate(names)}

    def alone(self, name: str) -> Iterator[Tensor]:
        """What each token of a request sees without drafts, in a cache that it has for itself."""
        cache, done = PolicyCache(self.policy, SHAPE, backend=self.backend), 0
        while True:
            count = min(CHUNK, PROMPTS[name] - done) if done < PROMPTS[name] else 1
            more = done + count < PROMPTS[name]
            valid = torch.ones(1, count, dtype=torch.bool)
            cache.begin(valid, prompt=done < PROMPTS[name], more=more)
            outs = []
            for layer in range(SHAPE.layers):
                q, k, v = (x[layer, done : done + count][None] for x in self.tokens[name])
                grouped = q.unflatten(2, (SHAPE.kv_heads, -1)).permute(0, 2, 3, 1, 4)
                fresh = k.transpose(1, 2), v.transpose(1, 2)
                for left in range(self.readers, -1, -1):
                    out = cache.attend(layer, grouped, *fresh, SCALE, more=left > 0)
                    outs.append(out.permute(0, 3, 1, 2, 4).flatten(2, 3)[0])
            yield from torch.stack(outs).unbind(1)
            done += count


TURNS = ("a", "ab", "abc", "bca", "cab", "ab", "abc", "ca", "cba", "abc", "b", "acb")


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "readers"), [*((name, 0) for name in POLICIES), ("window", 2)])
def test_drafts_attend_as_decoded_tokens_and_wrong_ones_leave_no_trace(
    name: str, readers: int, backend: str
) -> None:
    engine = Engine(POLICIES[name], backend, readers)
    alone = {name: engine.alone(name) for name in PROMPTS}
    for names in TURNS:
        for each, found in engine.step(*names).items():
            wanted = torch.stack([next(alone[each]) for _ in range(found.shape[1])], 1)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        held = engine.batch.held(kept=True)
        assert engine.pool.used == sum(each.pages for each in held.values())
    assert engine.accepted > 5
    assert engine.rejected > 5
    engine.batch.begin({}, tuple(PROMPTS))
    assert (engine.pool.used, engine.batch.pending) == (0, {})
