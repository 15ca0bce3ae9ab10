"""Random programs of operations on two stores over one pool, compared with the slow reference."""

import copy
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool, PoolExhausted, TokenStore
from kv_paging.reference import ReferenceStore, stored
from kv_policy import PageLayout, RawCodec, TokenFormat

LAYERS, HEADS = 2, 2
VECTORS = frozenset({"keys", "values"})


@dataclass(frozen=True)
class Offset:
    """Integers from -100 to 100 as bytes, and three more bytes: two uneven parts."""

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


class Program:
    """A cache of two tiers: sequences and tokens are added and removed, and pages reused."""

    def __init__(
        self, seed: int, tokens: int, *, slack: int = 0, capacity: int | None = None
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.done: Counter[str] = Counter()
        dim, wide = (8, True) if self.below(2) else (5, False)
        raw = TokenFormat(RawCodec(dim, torch.float32), RawCodec(3, torch.bfloat16))
        small = TokenFormat(Offset(dim), RawCodec(3, torch.bfloat16))
        exact = PageLayout.sized(raw, tokens, scores=True, positions=True)
        first = PageLayout(raw, tokens, exact.nbytes + slack, scores=True, positions=True)
        second = PageLayout.fitted(small, first.nbytes, scores=wide, positions=True)
        self.pool = PagePool(first.nbytes, capacity or 0, grows=capacity is None, poison=True)
        shape = (LAYERS, 1 + self.below(3), HEADS)
        self.stores = [TokenStore(self.pool, layout, *shape) for layout in (first, second)]
        self.oracles = [ReferenceStore(layout, *shape) for layout in (first, second)]

    def below(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self.random))

    def numbers(self, *shape: int, most: int = 100) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=self.random).float()

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random) < 0.1 * self.below(11)

    def both(self, which: int, name: str, *arguments: Tensor | None) -> None:
        """Call a store and its reference; an exhausted pool must leave the store unchanged."""
        oracle = copy.copy(self.oracles[which])
        oracle.tokens = {table_row: list(tokens) for table_row, tokens in oracle.tokens.items()}
        expected = getattr(oracle, name)(*arguments)
        needed = oracle.pages + self.oracles[1 - which].pages
        store = self.stores[which]
        if not self.pool.grows and needed > self.pool.capacity:
            self.done["dry"] += 1
            before = (store.table.clone(), store.length.clone(), self.pool.data.clone())
            free = self.pool.free
            with pytest.raises(PoolExhausted) as error:
                getattr(store, name)(*arguments)
            assert error.value.needed > error.value.free == self.pool.free == free
            assert all(map(torch.equal, before, (store.table, store.length, self.pool.data)))
            return
        assert getattr(store, name)(*arguments) == expected
        self.done[name] += oracle.tokens != self.oracles[which].tokens
        self.oracles[which] = oracle

    def some_table_rows(self, which: int) -> Tensor:
        """Return all table rows, or some in any order."""
        every = self.stores[which].length.numel()
        chosen = torch.randperm(every, generator=self.random)
        return chosen[: self.below(every + 1)] if self.below(2) else torch.arange(every)

    def some_slots(self, which: int, table_rows: Tensor) -> Tensor:
        """Return a slot of each table row, or -1, which leaves it unchanged."""
        length = self.stores[which].length.flatten()[table_rows]
        draw = torch.rand(len(table_rows), generator=self.random)
        return (draw * (length + 1)).long() - 1

    def tokens(self, which: int, *shape: int) -> list[Tensor | None]:
        """Draw keys, values, scores (many of them equal) and positions."""
        layout = self.stores[which].layout
        score = self.numbers(*shape, most=3)
        position = torch.randint(0, 1000, shape, generator=self.random)
        return [
            self.numbers(*shape, layout.format.key.dim),
            self.numbers(*shape, layout.format.value.dim),
            score if layout.scores else None,
            position if layout.positions else None,
        ]

    def append(self, which: int) -> None:
        table_rows, length = self.some_table_rows(which), self.below(25)
        keep = self.mask(len(table_rows), length)
        key, value, *beside = self.tokens(which, *keep.shape)
        self.both(which, "append", table_rows, key, value, keep, *beside)

    def decode(self, which: int) -> None:
        table_rows = self.stores[which].table_rows()
        key, value, *beside = self.tokens(which, len(table_rows), 1)
        keep = torch.ones(len(table_rows), 1, dtype=torch.bool)
        self.both(which, "append", table_rows, key, value, keep, *beside)

    def compact(self, which: int) -> None:
        table_rows, longest = self.some_table_rows(which), int(self.stores[which].length.amax())
        self.both(which, "compact", table_rows, self.mask(len(table_rows), longest + self.below(3)))

    def set_scores(self, which: int) -> None:
        if self.stores[which].layout.scores:
            table_rows, longest = self.some_table_rows(which), int(self.stores[which].length.amax())
            score = self.numbers(len(table_rows), longest + self.below(3), most=3)
            self.both(which, "set_scores", table_rows, score)

    def replace(self, which: int) -> None:
        table_rows = self.some_table_rows(which)
        slot = self.some_slots(which, table_rows)
        self.both(which, "replace", table_rows, slot, *self.tokens(which, len(table_rows)))

    def remove(self, which: int) -> None:
        table_rows = self.some_table_rows(which)
        self.both(which, "remove", table_rows, self.some_slots(which, table_rows))

    def select(self, which: int) -> None:
        sequences = self.stores[which].length.shape[1]
        source = torch.randint(0, sequences, (1 + self.below(4),), generator=self.random)
        self.both(which, "select", source)

    def clear(self, which: int) -> None:
        sequences = self.stores[which].length.shape[1]
        self.both(which, "clear", torch.tensor([self.below(sequences)]))

    def truncate(self, which: int) -> None:
        sequences = self.stores[which].length.shape[1]
        self.both(which, "truncate", torch.randint(0, 40, (sequences,), generator=self.random))

    def weakest(self, which: int) -> None:
        if self.stores[which].layout.scores:
            table_rows = self.some_table_rows(which)
            score, slot = self.stores[which].weakest(table_rows)
            found = list(zip(score.tolist(), slot.tolist(), strict=True))
            assert found == self.oracles[which].weakest(table_rows)

    def fetch(self, which: int) -> None:
        table_rows = self.some_table_rows(which)
        slot = self.some_slots(which, table_rows)
        one, every = (
            self.stores[which].fetch(table_rows, slot),
            self.stores[which].read(table_rows, VECTORS),
        )
        held = slot >= 0
        assert torch.equal(one.held[:, 0], held)
        for name, padding in (("score", 0), ("position", -1), ("key", 0), ("value", 0)):
            mine, all_of_them = getattr(one, name), getattr(every, name)
            if mine is not None:
                assert torch.equal(mine[held, 0], all_of_them[held, slot[held]])
                assert (mine[~held] == padding).all()

    def check(self) -> None:
        """Check the bytes, that every page is free or held once, and the results of reads."""
        self.pool.check(torch.cat([store.pages() for store in self.stores]))
        assert self.pool.free + self.pool.used == self.pool.capacity
        assert self.pool.used == sum(oracle.pages for oracle in self.oracles)
        assert [s.pages_used for s in self.stores] == [o.pages for o in self.oracles]
        for store, oracle in zip(self.stores, self.oracles, strict=True):
            assert stored(store) == oracle.tokens
            self.check_read(store, oracle)

    @staticmethod
    def check_read(store: TokenStore, oracle: ReferenceStore) -> None:
        read = store.read(store.table_rows(), VECTORS)
        length = store.length.flatten()
        assert torch.equal(read.held, torch.arange(int(length.amax())) < length[:, None])
        for name in ("score", "position", "key", "value"):
            given = getattr(read, name)
            if given is None:
                assert not getattr(store.layout, name + "s")
                continue
            told = [getattr(token, name) for tokens in oracle.tokens.values() for token in tokens]
            if name in ("key", "value"):
                codec = getattr(store.layout.format, name)
                data = torch.tensor(list(b"".join(told)), dtype=torch.uint8)
                assert torch.equal(
                    given[read.held], codec.decode(data.view(-1, sum(codec.parts)))[:, 0]
                )
            else:
                assert given[read.held].tolist() == told
            assert (given[~read.held] == (-1 if name == "position" else 0)).all()


STEPS = (
    *(["append"] * 4),
    *(["compact"] * 3),
    *(["decode", "remove", "replace"] * 2),
    *("set_scores", "select", "clear", "truncate", "weakest", "fetch"),
)


@pytest.mark.parametrize(
    ("tokens", "capacity"),
    [(1, None), (1, 60), (1, 200), (7, None), (7, 24), (7, 40), (16, None), (16, 16), (16, 24)],
)
def test_random_programs(tokens: int, capacity: int | None) -> None:
    done: Counter[str] = Counter()
    for seed in range(4):
        program = Program(seed, tokens, slack=3 * (seed % 2), capacity=capacity)
        for _ in range(40):
            step, which = STEPS[program.below(len(STEPS))], program.below(2)
            getattr(program, step)(which)
            program.check()
        done += program.done
    changes = {"append", "compact", "remove", "replace", "set_scores", "select", "clear"}
    assert changes <= done.keys()  # each operation changed something
    assert ("dry" in done) == (capacity is not None)


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_many_sequences_come_and_go(tokens: int) -> None:
    """Prompts, steps and finishes on 8 sequences; at the end all pages are free."""
    program = Program(tokens, tokens, slack=3)
    for which in (0, 1):
        program.both(which, "select", torch.zeros(8, dtype=torch.long))
    for _ in range(25):
        sequence = program.below(8)
        layers = torch.arange(LAYERS)[:, None] * 8 * HEADS
        table_rows = (layers + sequence * HEADS + torch.arange(HEADS)).flatten()
        for which in (0, 1):
            program.both(which, "clear", torch.tensor([sequence]))
            keep = program.mask(len(table_rows), 1 + program.below(40))
            key, value, *beside = program.tokens(which, *keep.shape)
            program.both(which, "append", table_rows, key, value, keep, *beside)
            program.decode(which)
            program.remove(which)
        program.check()
    for which in (0, 1):
        program.both(which, "clear", torch.arange(8))
    assert program.pool.used == 0
