"""Native decode steps, compared with those in torch, in programs of many operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_paging import PagePool, PerHeadRankTiers, Tiers, fit
from kv_policy import DROP, NOBODY, RawCodec, TokenFormat
from kv_quant.integer import IntegerCodec
from page_cases import codecs, twins
from page_twins import DTYPES, Twins, vectors

SHAPE = (2, 3, 2)  # layers, sequences, heads
TABLE_ROWS = 12


class Program:
    """Random prompts, steps and beams, with all pages compared after each."""

    def __init__(self, both: Twins, tiers: int, dims: tuple[int, int], seed: int) -> None:
        self.both, self.tiers, self.dims, self.next = both, tiers, dims, 0
        self.random = torch.Generator().manual_seed(seed)

    def below(self, bound: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, bound, shape, generator=self.random)

    def tokens(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        made = [vectors(self.random, *shape, dim).to(dtype) for dim in self.dims]
        place = torch.arange(self.next, self.next + shape[-1]).expand(shape)
        self.next += shape[-1]
        return [*made, torch.rand(shape, generator=self.random), place]

    def append(self) -> None:
        key, value, score, place = self.tokens(TABLE_ROWS, 5)
        tier = self.below(self.tiers + 1, TABLE_ROWS, 5)
        for i in range(self.tiers):
            self.both.do("append", i, torch.arange(TABLE_ROWS), key, value, tier == i, score, place)

    def step(self, dtype: torch.dtype = torch.float32) -> None:
        until = self.below(max(self.next, 1), TABLE_ROWS) if int(self.below(2)) else None
        (_, place), (_, other) = self.both.do("weakest", until)
        assert torch.equal(place, other)
        entering, victim = (
            self.below(self.tiers + 1, TABLE_ROWS),
            self.below(self.tiers + 1, TABLE_ROWS),
        )
        target = victim + 1 + self.below(self.tiers, TABLE_ROWS)
        self.both.do(
            "step",
            entering.where(entering < self.tiers, DROP).to(torch.uint8),
            victim.where(victim < self.tiers, NOBODY).to(torch.uint8),
            target.where(target < self.tiers, DROP).to(torch.uint8),
            place,
            *(x[:, 0] for x in self.tokens(TABLE_ROWS, 1, dtype=dtype)),
        )

    def select(self) -> None:
        self.both.do("select", self.below(3, 3))

    def run(self, operations: int, dtypes: list[torch.dtype] = DTYPES) -> None:
        for _ in range(operations):
            name = ("append", *(["step"] * 7), "select")[int(self.below(9))]
            if name == "step":
                self.step(dtypes[int(self.below(len(dtypes)))])
            else:
                getattr(self, name)()
            self.both.check()


def plain(forms: list[TokenFormat], tokens: int) -> Twins:
    layouts = fit(forms, tokens, True, True)
    return twins(lambda pool: Tiers(pool, layouts, *SHAPE), layouts[0].nbytes)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    tiers=st.integers(1, 4),
    tokens=st.integers(1, 5),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_tiers(isa, dims, tiers, tokens, seed, data):
    forms = [
        TokenFormat(data.draw(codecs(dims[0])), data.draw(codecs(dims[1]))) for _ in range(tiers)
    ]
    forms.sort(key=lambda form: form.nbytes + 8 * form.block, reverse=True)  # all formats fit
    Program(plain(forms, tokens), tiers, dims, seed).run(12)


def integers(key: int, value: int, bits: int) -> TokenFormat:
    return TokenFormat(IntegerCodec(key, bits), IntegerCodec(value, max(1, bits // 2)))


@pytest.mark.parametrize("tokens", [1, 3])
def test_heads_of_several_kinds(isa, tokens):
    dims = [(8, 6), (3, 5), (8, 1)]
    forms = [
        [TokenFormat(RawCodec(k, torch.bfloat16), RawCodec(v, torch.float32)), integers(k, v, 4)]
        for k, v in dims
    ]
    layouts = fit([form for each in forms for form in each], tokens, True, True)
    by_kind = [layouts[i : i + 2] for i in (0, 2, 4)]
    kind = torch.tensor([[0, 2], [1, 2]])

    def make(pool: PagePool) -> PerHeadRankTiers:
        return PerHeadRankTiers(pool, by_kind, kind, 3)

    Program(twins(make, layouts[0].nbytes), 2, (8, 6), tokens).run(12)


def test_candidates_in_float64_are_encoded_by_torch(isa):
    both = plain([integers(5, 4, 8), integers(5, 4, 4)], 3)
    Program(both, 2, (5, 4), 1).run(12, [torch.float64, torch.float32])


@pytest.mark.parametrize("threads", [1, 3])
def test_many_table_rows_in_threads(isa, threads):
    layouts = fit([integers(6, 6, 8), integers(6, 6, 4)], 2, True, True)
    both = twins(lambda pool: Tiers(pool, layouts, 20, 10, 3), layouts[0].nbytes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(0)
    try:
        for _ in range(5):
            (_, place), _ = both.do("weakest")
            candidate, victim, target = torch.randint(0, 3, (3, 600), generator=g).to(torch.uint8)
            x = vectors(g, 600, 6)
            score = torch.rand(600, generator=g)
            both.do("step", candidate, victim, target, place, x, -x, score, torch.zeros(600).int())
            both.check()
    finally:
        torch.set_num_threads(before)
