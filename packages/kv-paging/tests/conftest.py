"""Tiers, compared with lists of their expected tokens."""

import math
import sys
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from interpreted import interpret_without_gpu
from kv_paging import PagePool, PerHeadRankTiers, Tiers, fit
from kv_policy import DROP, NOBODY, RawCodec, RunningMean, RunningSum, TokenFormat

interpret_without_gpu()

of_triton = ["test_bounding.py", "test_recompilation.py", "test_triton.py"]
collect_ignore = [] if sys.platform == "linux" else of_triton

DIM = 4
RAW = TokenFormat(RawCodec(DIM, torch.float32), RawCodec(DIM, torch.float32))
BOTH = frozenset({"keys", "values"})


@dataclass(frozen=True)
class Steps:
    """Integers from -100 to 100, rounded down to multiples of `step`; blocks share a byte."""

    dim: int
    step: int = 1
    block: int = 1
    layout: None = None

    @property
    def parts(self) -> tuple[int, int]:
        return (self.block * self.dim, 1)

    def encode(self, x: Tensor) -> Tensor:
        codes = torch.floor(x.flatten(1) / self.step) + 101
        least = codes.amin(1, keepdim=True) - 1
        return torch.cat((codes - least, least), 1).to(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        codes = data[:, :-1].float() + data[:, -1:].float() - 101
        return (codes * self.step).view(-1, self.block, self.dim)

    def bound(self, x: Tensor) -> Tensor:
        return torch.full_like(x, self.step)


def form(step: int = 1, block: int = 1) -> TokenFormat:
    return TokenFormat(Steps(DIM, step, block), Steps(DIM, step, block))


def shortened(whole: TokenFormat, key: int, value: int) -> TokenFormat:
    """Return the same format for shorter vectors."""
    return TokenFormat(replace(whole.key, dim=key), replace(whole.value, dim=value))


DIMS = [(DIM, DIM), (2, 3), (DIM, 1)]  # of keys and values of each kind of heads


@dataclass(frozen=True)
class Token:
    score: float
    position: int
    key: tuple[float, ...]
    value: tuple[float, ...]

    def stored(self, step: int) -> "Token":
        def down(x: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(math.floor(number / step) * step for number in x)

        return replace(self, key=down(self.key), value=down(self.value))


PLAIN = [form(), form(3), form(7)]
IN_KEYS = "values in keys"
KINDS = {
    "one tier": PLAIN[:1],
    "two tiers": PLAIN[:2],
    "three tiers": PLAIN,
    "four tiers": [RAW, *PLAIN],
    "blocks above": [form(block=4), form(3)],
    "blocks below": [RAW, form(block=4)],
    "blocks in both": [form(block=2), form(block=4)],
    "one tier of blocks": [form(block=4)],
    IN_KEYS: [each.values_in_keys(DIM) for each in (RAW, *PLAIN[1:])],
}


class World:
    """Tiers and their expected tokens, by table row."""

    def __init__(
        self,
        kind: str,
        seed: int = 0,
        shape: tuple[int, int, int] = (2, 8, 2),
        capacity: int | None = None,
        tokens: int = 3,
        heads: list[list[int]] | None = None,  # the kind of each layer and head; None: all the same
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.formats, self.in_keys = KINDS[kind], kind == IN_KEYS
        formats = self.formats
        self.done = Counter[str]()
        dims = DIMS[: 1 if heads is None else max(map(max, heads)) + 1]
        every = [shortened(form, *dim) for dim in dims for form in formats]
        layouts = fit(every, tokens, True, True)
        nbytes = layouts[0].nbytes
        self.pool = PagePool(nbytes, capacity or 0, grows=capacity is None, poison=True)
        self.tiers: Tiers | PerHeadRankTiers
        if heads is None:
            self.tiers = Tiers(self.pool, layouts, *shape, raw=RAW)
            heads = [[0] * shape[2]] * shape[0]
        else:
            ways = len(formats)
            self.tiers = PerHeadRankTiers(
                self.pool,
                [layouts[i * ways : (i + 1) * ways] for i in range(len(dims))],
                torch.tensor(heads),
                shape[1],
                raw=[shortened(RAW, *dim) for dim in dims],
            )
        self.shape, self.next = shape, 0
        there = [[torch.arange(DIM) < n for n in dim] for dim in dims]
        self.there = [  # per table row, which elements of its keys and values a page keeps
            there[heads[n][h]]
            for n in range(shape[0])
            for _ in range(shape[1])
            for h in range(shape[2])
        ]
        self.held: list[list[list[Token]]] = [
            [[] for _ in range(math.prod(shape))] for _ in formats
        ]

    def below(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self.random))

    def tokens(self, table_rows: Tensor, *lead: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw keys, values, distinct scores and distinct positions, for each table row."""
        lead = (len(table_rows), *lead)
        count = math.prod(lead)
        vectors = torch.randint(-100, 101, (2, *lead, DIM), generator=self.random).float()
        if self.in_keys:
            vectors[1] = vectors[0]
        for i in range(2):
            there = torch.stack([self.there[table_row][i] for table_row in table_rows.tolist()])
            vectors[i] *= there.view(lead[0], *[1] * (len(lead) - 1), DIM)
        place = torch.arange(self.next, self.next + count).view(lead)
        self.next += count
        score = (place * 7919 % 10007).float()  # unique over all tokens of the test
        return vectors[0], vectors[1], score, place

    @staticmethod
    def named(key: Tensor, value: Tensor, score: Tensor, place: Tensor) -> list[Token]:
        rows = zip(score.tolist(), place.tolist(), key.tolist(), value.tolist(), strict=True)
        return [Token(s, p, tuple(k), tuple(v)) for s, p, k, v in rows]

    def rounded(self, tier: int, token: Token) -> Token:
        codec = self.formats[tier].key
        return token.stored(codec.step) if isinstance(codec, Steps) else token

    def prompt(self) -> None:
        """Replace one sequence by another with a prompt in all tiers."""
        sequences = self.shape[1]
        one = self.below(sequences)
        self.clear(torch.tensor([one]))
        table_rows = self.tiers.table_rows().view(self.shape)[:, one].flatten()
        length = 1 + self.below(25)
        key, value, score, place = self.tokens(table_rows, length)
        tier = torch.randint(0, len(self.formats) + 1, place.shape, generator=self.random)
        for i in range(len(self.formats)):
            self.tiers.append(i, table_rows, key, value, tier == i, score, place)
            for row, table_row in enumerate(table_rows.tolist()):
                chosen = tier[row] == i
                found = self.named(*(x[row][chosen] for x in (key, value, score, place)))
                self.held[i][table_row] += [self.rounded(i, token) for token in found]

    def clear(self, sequences: Tensor) -> None:
        self.tiers.clear(sequences)
        for table_row in self.tiers.table_rows().view(self.shape)[:, sequences].flatten().tolist():
            for tier in self.held:
                tier[table_row] = []

    def select(self) -> None:
        """Select beams: some sequences continue twice, others not at all."""
        source = torch.randint(0, self.shape[1], (self.shape[1],), generator=self.random)
        ids = self.tiers.table_rows().view(self.shape)[:, source].flatten().tolist()
        self.tiers.select(source, share=self.below(3) > 0)
        self.held = [[list(tier[i]) for i in ids] for tier in self.held]

    def step(self) -> None:
        """Insert one candidate and evict at most one victim in each table row."""
        table_rows, ways = math.prod(self.shape), len(self.formats)
        weakest, place = self.tiers.weakest()
        key, value, score, position = self.tokens(self.tiers.table_rows())
        entering = torch.randint(0, ways + 1, (table_rows,), generator=self.random)
        victim = torch.randint(0, ways + 1, (table_rows,), generator=self.random)
        further = torch.randint(0, ways, (table_rows,), generator=self.random)
        target = victim + 1 + further
        self.tiers.step(
            entering.where(entering < ways, DROP).to(torch.uint8),
            victim.where(victim < ways, NOBODY).to(torch.uint8),
            target.where(target < ways, DROP).to(torch.uint8),
            place,
            key,
            value,
            score,
            position,
        )
        for table_row, token in enumerate(self.named(key, value, score, position)):
            v, t, c = (int(x[table_row]) for x in (victim, target, entering))
            for i, tier in enumerate(self.held):
                least = min((x.score for x in tier[table_row]), default=torch.inf)
                assert float(weakest[i, table_row]) == least
                assert (int(place[i, table_row]) >= 0) == bool(tier[table_row])
            if v < ways and self.held[v][table_row]:
                leaving = min(self.held[v][table_row], key=lambda x: x.score)
                self.held[v][table_row].remove(leaving)
                if t < ways:
                    self.held[t][table_row].append(self.rounded(t, leaving))
                    self.done["down"] += 1
            if c < ways:
                self.held[c][table_row].append(self.rounded(c, token))

    def step_in(self, tier: int) -> None:
        """Insert a token into each table row's tier."""
        table_rows = math.prod(self.shape)
        tokens = self.tokens(self.tiers.table_rows())
        kinds = torch.zeros(table_rows, dtype=torch.uint8)
        place = torch.full((len(self.formats), table_rows), -1)
        self.tiers.step(kinds + tier, kinds + NOBODY, kinds + DROP, place, *tokens)
        for table_row, token in enumerate(self.named(*tokens)):
            self.held[tier][table_row].append(self.rounded(tier, token))

    def grow(self) -> None:
        """Append a token to the first tier of some table rows."""
        some = torch.rand(math.prod(self.shape), generator=self.random) < 0.7
        tokens = self.tokens(self.tiers.table_rows())
        self.tiers.grow(some, *tokens)
        for table_row, token in enumerate(self.named(*tokens)):
            if some[table_row]:
                self.held[0][table_row].append(self.rounded(0, token))

    def leave(self, tier: int, place: Tensor) -> None:
        """Evict the weakest token of each table row's tier."""
        table_rows = math.prod(self.shape)
        kinds = torch.zeros(table_rows, dtype=torch.uint8)
        self.tiers.step(
            kinds + DROP, kinds + tier, kinds + DROP, place, *self.tokens(self.tiers.table_rows())
        )
        for held in self.held[tier]:
            held.remove(min(held, key=lambda x: x.score))

    def rescore(self) -> None:
        """Set new scores of all tokens of some layers."""
        layers = slice(self.below(self.shape[0]), self.shape[0])
        ids = self.tiers.table_rows(layers).tolist()
        for tier, store in zip(self.tiers.tier, self.tiers.stores, strict=True):
            read = store.read_layers(layers)
            assert read.score is not None
            assert read.position is not None
            new = torch.rand(read.score.shape, generator=self.random)
            store.set_layers_scores(layers, new)
            for row, table_row in enumerate(ids):
                given = dict(zip(read.position[row].tolist(), new[row].tolist(), strict=True))
                self.held[tier][table_row] = [
                    replace(token, score=given.get(token.position, token.score))
                    for token in self.held[tier][table_row]
                ]

    def accumulate(self) -> None:
        """Update the scores of all tokens of a layer, except in some sequences."""
        ways = (RunningMean(), RunningMean(0), RunningMean(3), RunningSum(), RunningSum(6))
        layer, running = self.below(self.shape[0]), ways[self.below(len(ways))]
        ids = self.tiers.table_rows(slice(layer, layer + 1)).tolist()
        before = torch.randint(-1, 9, (len(ids),), generator=self.random)
        for tier, store in zip(self.tiers.tier, self.tiers.stores, strict=True):
            read = store.read_layer(layer)
            assert read.position is not None
            mass = torch.rand(read.held.shape, generator=self.random)
            seen = torch.randint(0, 3, read.held.shape, generator=self.random)
            store.accumulate_layers(slice(layer, layer + 1), before, mass, seen, running)
            for row, table_row in enumerate(ids):
                place = {at: slot for slot, at in enumerate(read.position[row].tolist())}
                for i, token in enumerate(self.held[tier][table_row]):
                    slot = place.get(token.position)  # only one of a tier's two stores has it
                    if slot is None or before[row] < 0:
                        continue
                    old, new = torch.tensor(token.score), mass[row, slot]
                    if isinstance(running, RunningSum):
                        score = old + new / running.over
                    else:
                        most = math.inf if running.last is None else running.last
                        past = min(max(int(before[row]) - 1 - token.position, 0), most)
                        score = (old * past + new) / max(past + int(seen[row, slot]), 1)
                    self.held[tier][table_row][i] = replace(token, score=float(score))

    def program(self, prompts: int, operations: int) -> None:
        """Run prompts, then random operations, with checks after each; finally free all pages."""
        steps = (
            *("prompt", "rescore", "accumulate", "select", "select", "clear", "trim"),
            *(["step"] * 5),
            *(["grow"] * 3),
        )
        for _ in range(prompts):
            self.prompt()
        for _ in range(operations):
            name = steps[self.below(len(steps))]
            if name == "clear":
                self.clear(torch.tensor([self.below(self.shape[1])]))
            elif name == "trim":
                self.tiers.trim()
            else:
                getattr(self, name)()
            self.done[name] += 1
            self.check()
        assert self.done["down"] or len(self.formats) == 1
        self.clear(torch.arange(self.shape[1]))
        assert self.pool.used == 0

    def check(self) -> None:
        """Check that every token is in its tier, and every page is free or held once."""
        self.tiers.check()
        assert self.pool.free + self.pool.used == self.pool.capacity
        assert self.pool.used == self.tiers.pages_used
        counts = [[len(x) for x in tier] for tier in self.held]
        assert self.tiers.counts().flatten(1).tolist() == counts
        found: list[list[list[Token]]] = [[[] for _ in tier] for tier in self.held]
        for tier, store in zip(self.tiers.tier, self.tiers.stores, strict=True):
            assert store.longest >= int(store.length.amax())
            for layer in range(self.shape[0]):
                read = store.read_layer(layer, BOTH)
                fields = (read.key, read.value, read.score, read.position)
                ids = self.tiers.table_rows(slice(layer, layer + 1)).tolist()
                for row, table_row in enumerate(ids):
                    chosen = [x[row][read.held[row]] for x in fields if x is not None]
                    found[tier][table_row] += self.named(*chosen)
        for mine, wanted in zip(found, self.held, strict=True):
            for a, b in zip(mine, wanted, strict=True):
                assert sorted(a, key=lambda x: x.position) == sorted(b, key=lambda x: x.position)


@pytest.fixture
def new_world() -> type[World]:
    """Return the class: every test creates a world of a kind."""
    return World
