"""Random programs of operations on two stores over one pool, against the slow oracle."""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kv_paging import PagePool, PoolExhausted, TokenStore
from kv_paging.reference import ReferenceStore, stored
from kv_policy import PageLayout, RawCodec, TokenFormat

LAYERS, HEADS = 2, 2


@dataclass(frozen=True)
class Offset:
    """Whole numbers from -100 to 100 as bytes, and three bytes beside them: two uneven parts."""

    dim: int
    block: int = 1
    layout: None = None

    @property
    def parts(self) -> tuple[int, int]:
        return (self.dim, 3)

    def encode(self, x: Tensor) -> Tensor:
        codes = (x[:, 0] + 100).to(torch.uint8)
        return torch.cat((codes, codes[:, :1].repeat(1, 3)), dim=1)

    def decode(self, data: Tensor) -> Tensor:
        return data[:, None, : self.dim].float() - 100

    def bound(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-100, 101, shape, generator=generator).float()


class Programs(RuleBasedStateMachine):
    """A cache of two tiers: sequences come and go, tokens too, and pages go round."""

    @initialize(
        tokens=st.sampled_from([1, 7, 16]),
        slack=st.sampled_from([0, 3, 8]),
        capacity=st.one_of(st.none(), st.integers(1, 40)),
        sequences=st.integers(1, 3),
        wide=st.booleans(),
    )
    def start(
        self, tokens: int, slack: int, capacity: int | None, sequences: int, wide: bool
    ) -> None:
        dim = 8 if wide else 5
        raw = TokenFormat(RawCodec(dim, torch.float32), RawCodec(3, torch.bfloat16))
        small = TokenFormat(Offset(dim), Offset(3))
        exact = PageLayout.sized(raw, tokens, scores=True, positions=True)
        first = PageLayout(raw, tokens, exact.nbytes + slack, scores=True, positions=True)
        second = PageLayout.fitted(small, first.nbytes, scores=wide, positions=True)
        self.pool = PagePool(first.nbytes, capacity or 0, grows=capacity is None, poison=True)
        self.stores = [
            TokenStore(self.pool, layout, LAYERS, sequences, HEADS) for layout in (first, second)
        ]
        self.oracles = [
            ReferenceStore(layout, LAYERS, sequences, HEADS) for layout in (first, second)
        ]

    def both(self, which: int, name: str, *arguments: Tensor | None) -> None:
        """Do the same to a store and its oracle; a dry pool must leave the store as it was."""
        oracle = copy.copy(self.oracles[which])
        oracle.tokens = {stream: list(tokens) for stream, tokens in oracle.tokens.items()}
        expected = getattr(oracle, name)(*arguments)
        needed = oracle.pages + self.oracles[1 - which].pages
        store = self.stores[which]
        before = (store.table.clone(), store.length.clone(), self.pool.data.clone())
        free = self.pool.free
        if not self.pool.grows and needed > self.pool.capacity:
            with pytest.raises(PoolExhausted) as error:
                getattr(store, name)(*arguments)
            assert error.value.needed > error.value.free == self.pool.free == free
            assert all(map(torch.equal, before, (store.table, store.length, self.pool.data)))
            return
        assert getattr(store, name)(*arguments) == expected
        self.oracles[which] = oracle

    def some_streams(self, which: int, generator: torch.Generator) -> Tensor:
        every = self.stores[which].length.numel()
        count = int(torch.randint(0, every + 1, (), generator=generator))
        return torch.randperm(every, generator=generator)[:count]

    def vectors(self, which: int, generator: torch.Generator, *shape: int) -> list[Tensor | None]:
        layout = self.stores[which].layout
        score = torch.randint(0, 5, shape, generator=generator).float()
        position = torch.randint(0, 1000, shape, generator=generator)
        return [
            numbers(generator, *shape, layout.format.key.dim),
            numbers(generator, *shape, layout.format.value.dim),
            score if layout.scores else None,
            position if layout.positions else None,
        ]

    def slots(self, which: int, streams: Tensor, generator: torch.Generator) -> Tensor:
        length = self.stores[which].length.flatten()[streams]
        draw = torch.rand(len(streams), generator=generator)
        return (draw * (length + 1)).long() - 1  # from -1, which leaves the stream alone

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99), tokens=st.integers(0, 20))
    def append(self, which: int, seed: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        streams = self.some_streams(which, generator)
        keep = torch.rand(len(streams), tokens, generator=generator) < 0.1 * (seed % 11)
        key, value, score, position = self.vectors(which, generator, len(streams), tokens)
        self.both(which, "append", streams, key, value, keep, score, position)

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99))
    def decode_step(self, which: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        streams = self.stores[which].streams()
        keep = torch.ones(len(streams), 1, dtype=torch.bool)
        key, value, score, position = self.vectors(which, generator, len(streams), 1)
        self.both(which, "append", streams, key, value, keep, score, position)

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99))
    def compact(self, which: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        streams = self.some_streams(which, generator)
        longest = int(self.stores[which].length.amax())
        keep = torch.rand(len(streams), longest + 2, generator=generator) < 0.1 * (seed % 11)
        self.both(which, "compact", streams, keep)

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99))
    def set_scores(self, which: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        if self.stores[which].layout.scores:
            streams = self.some_streams(which, generator)
            longest = int(self.stores[which].length.amax())
            score = numbers(generator, len(streams), longest)
            self.both(which, "set_scores", streams, score)

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99))
    def replace(self, which: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        streams = self.some_streams(which, generator)
        slot = self.slots(which, streams, generator)
        self.both(which, "replace", streams, slot, *self.vectors(which, generator, len(streams)))

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99))
    def remove(self, which: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        streams = self.some_streams(which, generator)
        self.both(which, "remove", streams, self.slots(which, streams, generator))

    @rule(which=st.integers(0, 1), source=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def select(self, which: int, source: list[int]) -> None:
        self.both(which, "select", torch.tensor(source) % self.stores[which].length.shape[1])

    @rule(which=st.integers(0, 1), sequence=st.integers(0, 9))
    def clear(self, which: int, sequence: int) -> None:
        self.both(which, "clear", torch.tensor([sequence % self.stores[which].length.shape[1]]))

    @rule(which=st.integers(0, 1), length=st.lists(st.integers(0, 30), min_size=4, max_size=4))
    def truncate(self, which: int, length: list[int]) -> None:
        self.both(which, "truncate", torch.tensor(length)[: self.stores[which].length.shape[1]])

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99))
    def weakest(self, which: int, seed: int) -> None:
        if self.stores[which].layout.scores:
            streams = self.some_streams(which, torch.Generator().manual_seed(seed))
            score, slot = self.stores[which].weakest(streams)
            found = list(zip(score.tolist(), slot.tolist(), strict=True))
            assert found == self.oracles[which].weakest(streams)

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99))
    def fetch(self, which: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        streams = self.some_streams(which, generator)
        slot = self.slots(which, streams, generator)
        one = self.stores[which].fetch(streams, slot)
        every = self.stores[which].read(streams, frozenset({"keys", "values"}))
        assert torch.equal(one.held[:, 0], slot >= 0)
        for name, padding in (("score", 0), ("position", -1), ("key", 0), ("value", 0)):
            numbers, all_numbers = getattr(one, name), getattr(every, name)
            if numbers is not None:
                held = slot >= 0
                assert torch.equal(numbers[held, 0], all_numbers[held, slot[held]])
                assert (numbers[~held] == padding).all()

    @invariant()
    def bytes_are_exact(self) -> None:
        for store, oracle in zip(self.stores, self.oracles, strict=True):
            assert stored(store) == oracle.tokens

    @invariant()
    def every_page_is_free_or_in_one_place(self) -> None:
        self.pool.check(torch.cat([store.pages() for store in self.stores]))
        assert self.pool.used == sum(oracle.pages for oracle in self.oracles)
        assert [s.pages_used for s in self.stores] == [o.pages for o in self.oracles]
        assert self.pool.free + self.pool.used == self.pool.capacity

    @invariant()
    def reading_gives_the_tokens_and_nothing_else(self) -> None:
        for store, oracle in zip(self.stores, self.oracles, strict=True):
            streams = store.streams()
            read = store.read(streams, frozenset({"keys", "values"}))
            length = store.length.flatten()
            assert torch.equal(read.held.sum(1), length)
            assert torch.equal(read.held, torch.arange(int(length.amax())) < length[:, None])
            for name, codec in (
                ("key", store.layout.format.key),
                ("value", store.layout.format.value),
            ):
                vectors = getattr(read, name)
                raw = b"".join(getattr(t, name) for s in oracle.tokens.values() for t in s)
                data = torch.tensor(list(raw), dtype=torch.uint8).view(-1, sum(codec.parts))
                assert torch.equal(vectors[read.held], codec.decode(data)[:, 0])
                assert (vectors[~read.held] == 0).all()
            for name, padding in (("score", 0), ("position", -1)):
                number = getattr(read, name)
                if number is not None:
                    told = [getattr(t, name) for s in oracle.tokens.values() for t in s]
                    assert number[read.held].tolist() == told
                    assert (number[~read.held] == padding).all()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, derandomize=True
)


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_many_sequences_come_and_go(tokens: int) -> None:
    """Prompts, steps and finishes on 8 sequences, longer than the machine above would go."""
    generator = torch.Generator().manual_seed(tokens)
    machine = Programs()
    machine.start(tokens, slack=3, capacity=None, sequences=8, wide=True)
    for round in range(30):
        done = int(torch.randint(0, 8, (), generator=generator))
        for which in (0, 1):
            machine.both(which, "clear", torch.tensor([done]))
            layers = torch.arange(LAYERS)[:, None] * 8 * HEADS
            streams = (layers + done * HEADS + torch.arange(HEADS)).flatten()
            prompt = int(torch.randint(1, 40, (), generator=generator))
            keep = torch.rand(len(streams), prompt, generator=generator) < 0.6
            key, value, *beside = machine.vectors(which, generator, len(streams), prompt)
            machine.both(which, "append", streams, key, value, keep, *beside)
            machine.decode_step(which, round)
            machine.remove(which, round)
        machine.bytes_are_exact()
        machine.every_page_is_free_or_in_one_place()
    machine.reading_gives_the_tokens_and_nothing_else()
    for which in (0, 1):
        machine.both(which, "clear", torch.arange(8))
    assert machine.pool.used == 0
