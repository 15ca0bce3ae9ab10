"""All tiers of a cache over one pool, against lists of tokens."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kv_paging import PagePool, PoolExhausted, Tiers, fit
from kv_paging.table import columns_for, pages_for
from kv_policy import DROP, NOBODY, RawCodec, TokenFormat

DIM = 4
RAW = TokenFormat(RawCodec(DIM, torch.float32), RawCodec(DIM, torch.float32))
BOTH = frozenset({"keys", "values"})


@dataclass(frozen=True)
class Steps:
    """Whole numbers from -100 to 100, rounded down to multiples of `step`; blocks share a byte."""

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


class World:
    """Tiers and what they should hold, stream by stream."""

    def __init__(
        self,
        formats: list[TokenFormat],
        seed: int = 0,
        shape: tuple[int, int, int] = (2, 8, 2),
        capacity: int | None = None,
        tokens: int = 3,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.formats, self.done = formats, Counter[str]()
        layouts = fit(formats, tokens, True, True)
        nbytes = layouts[0].nbytes
        self.pool = PagePool(nbytes, capacity or 0, grows=capacity is None, poison=True)
        self.tiers = Tiers(self.pool, layouts, *shape, raw=RAW)
        self.shape, self.next = shape, 0
        self.held: list[list[list[Token]]] = [
            [[] for _ in range(math.prod(shape))] for _ in formats
        ]

    def below(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self.random))

    def tokens(self, *lead: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, scores that differ, positions that differ."""
        count = math.prod(lead)
        vectors = torch.randint(-100, 101, (2, *lead, DIM), generator=self.random).float()
        place = torch.arange(self.next, self.next + count).view(lead)
        self.next += count
        score = (place * 7919 % 10007).float()  # differs for all that are ever made here
        return vectors[0], vectors[1], score, place

    @staticmethod
    def named(key: Tensor, value: Tensor, score: Tensor, place: Tensor) -> list[Token]:
        rows = zip(score.tolist(), place.tolist(), key.tolist(), value.tolist(), strict=True)
        return [Token(s, p, tuple(k), tuple(v)) for s, p, k, v in rows]

    def rounded(self, tier: int, token: Token) -> Token:
        codec = self.formats[tier].key
        return token.stored(codec.step) if isinstance(codec, Steps) else token

    def prompt(self) -> None:
        """One sequence ends, and another takes its place with a prompt in all tiers."""
        sequences = self.shape[1]
        one = self.below(sequences)
        self.clear(torch.tensor([one]))
        streams = self.tiers.streams().view(self.shape)[:, one].flatten()
        length = 1 + self.below(25)
        key, value, score, place = self.tokens(len(streams), length)
        tier = torch.randint(0, len(self.formats) + 1, place.shape, generator=self.random)
        for i in range(len(self.formats)):
            self.tiers.append(i, streams, key, value, tier == i, score, place)
            for row, stream in enumerate(streams.tolist()):
                chosen = tier[row] == i
                found = self.named(*(x[row][chosen] for x in (key, value, score, place)))
                self.held[i][stream] += [self.rounded(i, token) for token in found]

    def clear(self, sequences: Tensor) -> None:
        self.tiers.clear(sequences)
        for stream in self.tiers.streams().view(self.shape)[:, sequences].flatten().tolist():
            for tier in self.held:
                tier[stream] = []

    def select(self) -> None:
        """Beams: some sequences go on twice, others not at all."""
        source = torch.randint(0, self.shape[1], (self.shape[1],), generator=self.random)
        ids = self.tiers.streams().view(self.shape)[:, source].flatten().tolist()
        self.tiers.select(source)
        self.held = [[list(tier[i]) for i in ids] for tier in self.held]

    def step(self) -> None:
        """One candidate and at most one victim in each stream."""
        streams, ways = math.prod(self.shape), len(self.formats)
        weakest, place = self.tiers.weakest()
        key, value, score, position = self.tokens(streams)
        entering = torch.randint(0, ways + 1, (streams,), generator=self.random)
        victim = torch.randint(0, ways + 1, (streams,), generator=self.random)
        further = torch.randint(0, ways, (streams,), generator=self.random)
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
        for stream, token in enumerate(self.named(key, value, score, position)):
            v, t, c = (int(x[stream]) for x in (victim, target, entering))
            for i, tier in enumerate(self.held):
                least = min((x.score for x in tier[stream]), default=torch.inf)
                assert float(weakest[i, stream]) == least
                assert (int(place[i, stream]) >= 0) == bool(tier[stream])
            if v < ways and self.held[v][stream]:
                leaving = min(self.held[v][stream], key=lambda x: x.score)
                self.held[v][stream].remove(leaving)
                if t < ways:
                    self.held[t][stream].append(self.rounded(t, leaving))
                    self.done["down"] += 1
            if c < ways:
                self.held[c][stream].append(self.rounded(c, token))

    def step_in(self, tier: int) -> None:
        """A token enters each stream's tier."""
        streams = math.prod(self.shape)
        tokens = self.tokens(streams)
        kinds = torch.zeros(streams, dtype=torch.uint8)
        place = torch.full((len(self.formats), streams), -1)
        self.tiers.step(kinds + tier, kinds + NOBODY, kinds + DROP, place, *tokens)
        for stream, token in enumerate(self.named(*tokens)):
            self.held[tier][stream].append(self.rounded(tier, token))

    def leave(self, tier: int, place: Tensor) -> None:
        """The weakest of each stream's tier goes."""
        streams = math.prod(self.shape)
        kinds = torch.zeros(streams, dtype=torch.uint8)
        self.tiers.step(kinds + DROP, kinds + tier, kinds + DROP, place, *self.tokens(streams))
        for tokens in self.held[tier]:
            tokens.remove(min(tokens, key=lambda x: x.score))

    def rescore(self) -> None:
        """All tokens of a layer get new scores."""
        layer = self.below(self.shape[0])
        ids = self.tiers.streams(slice(layer, layer + 1)).tolist()
        for tier, store in zip(self.tiers.tier, self.tiers.stores, strict=True):
            read = store.read_layer(layer)
            assert read.score is not None
            assert read.position is not None
            new = torch.rand(read.score.shape, generator=self.random)
            store.set_layer_scores(layer, new)
            for row, stream in enumerate(ids):
                given = dict(zip(read.position[row].tolist(), new[row].tolist(), strict=True))
                self.held[tier][stream] = [
                    replace(token, score=given.get(token.position, token.score))
                    for token in self.held[tier][stream]
                ]

    def check(self) -> None:
        """Every token is where it should be, and every page is free or in one place."""
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
                ids = self.tiers.streams(slice(layer, layer + 1)).tolist()
                for row, stream in enumerate(ids):
                    chosen = [x[row][read.held[row]] for x in fields if x is not None]
                    found[tier][stream] += self.named(*chosen)
        for mine, wanted in zip(found, self.held, strict=True):
            for a, b in zip(mine, wanted, strict=True):
                assert sorted(a, key=lambda x: x.position) == sorted(b, key=lambda x: x.position)


PLAIN = [form(), form(3), form(7)]
KINDS = {
    "one tier": PLAIN[:1],
    "two tiers": PLAIN[:2],
    "three tiers": PLAIN,
    "four tiers": [RAW, *PLAIN],
    "blocks above": [form(block=4), form(3)],
    "blocks below": [RAW, form(block=4)],
    "blocks in both": [form(block=2), form(block=4)],
}
STEPS = ("prompt", "step", "step", "step", "step", "step", "rescore", "select", "clear")


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", list(KINDS))
def test_random_programs(kind: str, tokens: int) -> None:
    world = World(KINDS[kind], seed=tokens, tokens=tokens)
    for _ in range(8):
        world.prompt()
    for _ in range(25):
        name = STEPS[world.below(len(STEPS))]
        if name == "clear":
            world.clear(
                torch.tensor(
                    [
                        world.below(8),
                    ]
                )
            )
        else:
            getattr(world, name)()
        world.done[name] += 1
        world.check()
    assert world.done["down"] or len(world.formats) == 1
    world.clear(torch.arange(8))
    assert world.pool.used == 0


@pytest.mark.parametrize(
    ("kind", "capacity"), [("two tiers", 12), ("three tiers", 16), ("blocks above", 9)]
)
def test_a_fixed_pool_that_runs_dry_changes_nothing(kind: str, capacity: int) -> None:
    world = World(KINDS[kind], shape=(1, 2, 2), capacity=capacity)
    dry = 0
    for _ in range(60):
        before = (world.pool.data.clone(), [s.length.clone() for s in world.tiers.stores])
        held = [[list(x) for x in tier] for tier in world.held]
        try:
            world.step()
        except PoolExhausted:
            dry += 1
            assert torch.equal(before[0], world.pool.data)
            lengths = zip(before[1], world.tiers.stores, strict=True)
            assert all(torch.equal(a, b.length) for a, b in lengths)
            world.held = held
            world.clear(torch.tensor([world.below(2)]))
        world.check()
    assert dry


@pytest.mark.parametrize("kind", ["two tiers", "three tiers"])
def test_a_step_with_one_tier_given_takes_one_page_a_stream_at_most(kind: str) -> None:
    world = World(KINDS[kind], shape=(2, 3, 2))
    for _ in range(30):
        before = world.pool.used
        world.step()
        assert world.pool.used - before <= math.prod(world.shape) * len(world.formats)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 40), st.integers(1, 40))
def test_a_table_from_both_sides_never_overflows(high: int, low: int, t: int, u: int) -> None:
    """LeanKV section 5.2 says ceil(N / t), which is one too few where both last pages are open."""
    columns = columns_for(high + low, min(t, u))
    assert pages_for(high, t) + pages_for(low, u) <= columns
    assert columns <= -(-(high + low) // min(t, u)) + 1


def test_a_long_generation_stays_within_its_table() -> None:
    world = World(PLAIN[:2], shape=(1, 2, 2))
    for _ in range(150):
        world.step()
    world.check()
    high, low = world.tiers.stores
    most = int((high.length + low.length).amax())
    fewest = min(high.layout.tokens, low.layout.tokens)
    assert high.table.shape[-1] <= columns_for(most, fewest) + columns_for(2 * 64, fewest)


def test_tokens_wait_until_they_fill_a_block() -> None:
    world = World([form(block=4)], shape=(1, 1, 1))
    blocks, waiting = world.tiers.stores
    for count in range(1, 10):
        world.step_in(0)
        assert (int(blocks.length), int(waiting.length)) == (count // 4 * 4, count % 4)
        world.check()


def test_a_block_goes_when_its_last_token_has() -> None:
    world = World([RAW, form(block=4)], shape=(1, 1, 1))
    for _ in range(8):
        world.step_in(1)
    blocks, _ = world.tiers.stores[1:]
    assert world.tiers.views(0)[0].holes
    sizes = []
    for _ in range(8):
        _, place = world.tiers.weakest()
        world.leave(1, place)
        world.check()
        sizes.append(int(blocks.length))
    assert sizes[-1] == 0
    assert set(sizes) <= {0, 4, 8}
    assert world.pool.used == 0


def test_bad_tiers() -> None:
    pool = PagePool(fit([form(block=4)], 4)[0].nbytes)
    with pytest.raises(ValueError, match="a tier encodes 4 tokens together; say as `raw`"):
        Tiers(pool, fit([form(block=4)], 4), 1, 1, 1)
    with pytest.raises(ValueError, match="no tier is given"):
        Tiers(pool, [], 1, 1, 1)
