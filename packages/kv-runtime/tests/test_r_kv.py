"""R-KV in a cache that generates, beside plain Python that plans from scratch."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kv_policy import parse
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE
from tiered_world import ragged

SCALE = 0.4


@dataclass
class Head:
    """The tokens of one KV head of one sequence: their keys, and their mean attention."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)

    def attend(self, queries: Tensor, first: int, last: int) -> tuple[dict, dict]:
        """Sum the maxima of a group for its last queries, of tokens before the query; count them.

        Queries are [G, L, D], at positions from `first` on.
        """
        mass, seen = dict.fromkeys(self.keys, 0.0), dict.fromkeys(self.keys, 0)
        for i in range(max(0, queries.shape[1] - last), queries.shape[1]):
            visible = [p for p in self.keys if p <= first + i]
            keys = torch.stack([self.keys[p] for p in visible])
            most = (queries[:, i] @ keys.mT * SCALE).softmax(-1).amax(0)
            for p, x in zip(visible, most.tolist(), strict=True):
                if p < first + i:
                    mass[p] += x
                    seen[p] += 1
        return mass, seen

    def read(self, queries: Tensor, first: int, window: int) -> None:
        """Score the tokens after a prompt."""
        mass, seen = self.attend(queries, first, window)
        for p in self.keys:
            new, old = mass[p] / max(1, seen[p]), self.score.get(p, 0.0)
            share = seen[p] / window if old else 1
            self.score[p] = share * new + (1 - share) * old

    def generate(self, queries: Tensor, place: int, window: int) -> None:
        """Update the averages with the query at `place`."""
        mass, seen = self.attend(queries, place, 1)
        for p in self.keys:
            past = min(max(0, place - 1 - p), window // 2)
            old = self.score.get(p, 0.0)
            self.score[p] = (old * past + mass[p]) / max(1, past + seen[p])

    def plan(self, length: int, budget: int, window: int, pool: int, weight: float) -> None:
        """Keep the best tokens and the newest."""
        places = sorted(self.keys)
        older = [p for p in places if p < length - window]
        unit = torch.stack([self.keys[p] / self.keys[p].norm() for p in places])
        cosine = (unit @ unit.mT).fill_diagonal_(0)
        for row in cosine:
            alike = (row > 0.5).nonzero()[:, 0].tolist()
            if alike:
                row[alike[-1]] = 0
        redundant = dict(zip(places, cosine.mean(0).softmax(0).tolist(), strict=True))
        total = {p: math.inf for p in places if p not in older}
        for p in older:
            near = max(self.score[q] for q in older if abs(p - q) <= pool // 2)
            total[p] = weight * near - (1 - weight) * redundant[p]
        kept = sorted(places, key=lambda p: (-total[p], p))[:budget]
        self.keys = {p: self.keys[p] for p in kept}
        self.score = {p: self.score[p] for p in kept}


class Model:
    """Random vectors, a cache, and each head by itself."""

    def __init__(self, text: str, lengths: tuple[int, ...]) -> None:
        self.cache = PolicyCache(parse(text), SHAPE, page_tokens=4)
        self.policy, self.sequences = parse(text), len(lengths)
        self.length = [0] * self.sequences
        self.heads = {
            (layer, b, h): Head()
            for layer in range(SHAPE.layers)
            for b in range(self.sequences)
            for h in range(SHAPE.kv_heads)
        }
        self.generator = torch.Generator().manual_seed(3)
        self.steps = 0

    def drawn(self, *size: int) -> Tensor:
        lead = (SHAPE.layers, self.sequences, SHAPE.kv_heads)
        return torch.randn(*lead, *size, generator=self.generator)

    def forward(self, lengths: tuple[int, ...], *, more: bool = False) -> None:
        valid = ragged(*lengths)
        width, prompt = valid.shape[1], lengths != (1,) * self.sequences
        # Few directions, so that many keys are similar.
        key = self.drawn(width, 6).round() + self.drawn(width, 6) / 9
        query, value = self.drawn(2, width, 6) * 2, self.drawn(width, 5)
        self.cache.begin(valid, remaining=int(more))
        for layer in range(SHAPE.layers):
            self.cache.attend(layer, query[layer], key[layer], value[layer], SCALE)
        self.steps = 0 if prompt else self.steps + 1
        policy = self.policy
        due = (prompt and not more) or (policy.every and self.steps == policy.every)
        for (layer, b, h), head in self.heads.items():
            first, real = self.length[b], valid[b]
            for i, k in enumerate(key[layer, b, h][real].double()):
                head.keys[first + i] = k
            queries = query[layer, b, h][:, real].double()
            if prompt:
                head.read(queries, first, policy.window)
            elif policy.every:
                head.generate(queries, first, policy.window)
            if due:
                budget = int(policy.budget.amount)
                total = first + int(real.sum())
                head.plan(total, budget, policy.window, policy.pool, policy.weight)
        self.steps = 0 if due else self.steps
        self.length = [n + new for n, new in zip(self.length, lengths, strict=True)]

    def check(self) -> None:
        """Compare what the heads hold: positions and scores."""
        batch = self.cache.batch
        (store,) = batch.stores
        read = store.read(store.table_rows())
        rows = [*zip(read.position, read.score, read.held, strict=True)]
        for (position, score, held), head in zip(rows, self.heads.values(), strict=True):
            found = dict(zip(position[held].tolist(), score[held].tolist(), strict=True))
            assert sorted(found) == sorted(head.keys)
            if self.policy.every:
                assert found == pytest.approx(head.score, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "options", ["every=5", "every=3,similar=0.5,weight=0.3,pool=1", "every=0", "every=4,window=9"]
)
def test_generation_is_planned_as_from_scratch(options: str) -> None:
    rest = "" if "window" in options else ",window=4"
    model = Model(f"r-kv:budget=12,{options}{rest}", (19, 12))
    every = model.policy.every
    model.forward((11, 7), more=True)
    model.check()
    model.forward((8, 5))
    model.check()
    for step in range(1, 14):
        model.forward((1, 1))
        model.check()
        counts = [len(head.keys) for head in model.heads.values()]
        assert max(counts) == 12 + (step % every if every else step)
    model.forward((6, 2))  # another turn, with fewer queries than the window
    model.check()
    for _ in range(6):
        model.forward((1, 1))
        model.check()
