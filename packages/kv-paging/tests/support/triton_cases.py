"""Pairs of caches written by Triton's kernels and by torch on the CPU.

With a GPU, the kernels are compiled and run there. Otherwise Triton's interpreter runs them, which
tests/conftest.py enables before triton is imported.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kv_paging import PagePool, PerHeadRankTiers, Stored, Tiers, TokenStore
from kv_policy import DROP, NOBODY, Codec, PageLayout, RawCodec, TokenFormat
from kv_quant.integer import IntegerCodec
from page_twins import DTYPES, Twins, vectors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMED = dict(zip(("float32", "float16", "bfloat16"), DTYPES, strict=True))


def same(first: object, second: object) -> None:
    """Check that all tensors are equal, bitwise except for NaN, with equal dtypes."""
    if isinstance(first, Tensor):
        assert isinstance(second, Tensor)
        assert first.dtype == second.dtype
        torch.testing.assert_close(second.cpu(), first, rtol=0, atol=0, equal_nan=True)
    elif isinstance(first, tuple):
        assert isinstance(second, tuple)
        for a, b in zip(first, second, strict=True):
            same(a, b)
    elif isinstance(first, Stored):
        for name in ("held", "score", "position", "key", "value"):
            a, b = getattr(first, name), getattr(second, name)
            assert (a is None) == (b is None), name
            same(a, b)
    else:
        assert first == second


class Both(Twins):
    """Twins that are compared after every operation."""

    def __init__(
        self, make: Callable[[PagePool], TokenStore | Tiers | PerHeadRankTiers], nbytes: int
    ):
        super().__init__(make, nbytes, "triton", DEVICE)

    def do(self, name: str, *arguments: object) -> object:
        """Call a method of both, check that the results are equal, and return one."""
        first, second = super().do(name, *arguments)
        same(first, second)
        self.check()
        return first

    def make_room(self) -> None:
        """Grow the pool and tables in advance, for the next steps."""
        for pool, one in zip(self.pools, self.each, strict=True):
            pool.reserve(256)
            for store in one.stores:
                store.widen(32)


def one_store(layout: PageLayout, table_rows: int = 3) -> Both:
    return Both(lambda pool: TokenStore(pool, layout, 1, table_rows, 1), layout.nbytes)


def codec(kind: str, dim: int) -> Codec:
    """Return integers by "bits" or "bits/group", and plain numbers by the name of a dtype."""
    if kind in NAMED:
        return RawCodec(dim, NAMED[kind])
    bits, _, group = kind.partition("/")
    return IntegerCodec(dim, int(bits), int(group or 0))


def form(keys: str, values: str, key: int, value: int) -> TokenFormat:
    return TokenFormat(codec(keys, key), codec(values, value))


class Program:
    """Random prompts, steps and beams, with all pages compared after each."""

    def __init__(
        self, both: Both, tiers: int, table_rows: int, sequences: int, dims: tuple[int, int]
    ) -> None:
        self.both, self.tiers, self.table_rows, self.dims = both, tiers, table_rows, dims
        self.sequences, self.next = sequences, 0
        self.random = torch.Generator().manual_seed(tiers)

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(0, bound, shape, generator=self.random)

    def tokens(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        made = [vectors(self.random, *shape, dim).to(dtype) for dim in self.dims]
        place = torch.arange(self.next, self.next + shape[-1]).expand(shape)
        self.next += shape[-1]
        return [*made, torch.rand(shape, generator=self.random), place]

    def append(self) -> None:
        key, value, score, place = self.tokens(self.table_rows, 5)
        tier = self.below(self.tiers + 1, self.table_rows, 5)
        for i in range(self.tiers):
            every = torch.arange(self.table_rows)
            self.both.do("append", i, every, key, value, tier == i, score, place)

    def step(self, dtype: torch.dtype = torch.float32) -> None:
        until = self.below(max(self.next, 1), self.table_rows) if int(self.below(2)) else None
        _, place = self.both.do("weakest", until)
        many = self.tiers + 1
        entering, victim = self.below(many, self.table_rows), self.below(many, self.table_rows)
        target = victim + 1 + self.below(self.tiers, self.table_rows)
        self.both.do(
            "step",
            entering.where(entering < self.tiers, DROP).to(torch.uint8),
            victim.where(victim < self.tiers, NOBODY).to(torch.uint8),
            target.where(target < self.tiers, DROP).to(torch.uint8),
            place,
            *(x[:, 0] for x in self.tokens(self.table_rows, 1, dtype=dtype)),
        )

    def select(self) -> None:
        self.both.do("select", self.below(self.sequences, self.sequences))

    def run(self, *steps: int, dtypes: list[torch.dtype] = DTYPES) -> None:
        """Run a prompt, the given numbers of steps, and beams, repeatedly."""
        for many in steps:
            self.append()
            for i in range(many):
                self.step(dtypes[i % len(dtypes)])
            self.select()
