"""The same operations on two caches: pages in torch on the CPU, and in Triton.

Where there is a GPU, Triton's kernels are compiled and run there. Elsewhere its interpreter runs
them; it is switched on here while triton is imported, and by the fixture `triton` for one test at a
time, so that no other test is given these kernels.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from kv_paging import PagePool, RaggedTiers, Stored, Tiers, TokenStore
from kv_paging.kernels import MODULES
from kv_paging.triton_kernels import INTERPRET
from kv_policy import DROP, NOBODY, Codec, PageLayout, RawCodec, TokenFormat
from kv_quant.integer import IntegerCodec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SWITCH = {} if DEVICE.type == "cuda" else {INTERPRET: "1"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMED = dict(zip(("float32", "float16", "bfloat16"), DTYPES, strict=True))
EDGES = [
    *(0.0, -0.0, 1e-10, -1e-10, 2**-24, -(2**-24), 2**-25, 1e-40, -1e-40, 6.1e-5, -6.2e-5),
    *(1.0, -1.0, 1 + 2**-11, 32752.0, -32752.0, 32753.0, 65504.0, -65519.0, 65520.0, 3e38, -3e38),
]
STRANGE = [torch.inf, -torch.inf, torch.nan]


def cannot() -> str | None:
    """Say why Triton's kernels cannot be tested in this process."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if SWITCH and importlib.util.find_spec("numpy") is None:
        return "triton's interpreter needs numpy"
    with patch.dict(os.environ, SWITCH):
        there = "triton" in sys.modules
        import kv_paging.gpu.step  # noqa: F401
        from kv_paging.gpu.counts import total

    interpreted = type(total).__name__ == "InterpretedFunction"
    if interpreted != bool(SWITCH) or (there and SWITCH and not _all_interpreted()):
        return "triton was imported before this test could choose its interpreter"
    return None


def _all_interpreted() -> bool:
    import triton.language as tl

    return type(tl.sum).__name__ == "InterpretedFunction"


def vectors(generator: torch.Generator, *shape: int, strange: bool = False) -> Tensor:
    """Numbers of all sizes, some of them at the edges; whole rows may be equal."""
    x = torch.randn(shape, generator=generator)
    x = x * torch.pow(10.0, torch.randint(-9, 5, (*shape[:-1], 1), generator=generator))
    edges = torch.tensor(EDGES + (STRANGE if strange else []))
    drawn = edges[torch.randint(0, len(edges), shape, generator=generator)]
    x = x.where(torch.rand(shape, generator=generator) < 0.8, drawn)
    flat = torch.rand((*shape[:-1], 1), generator=generator) < 0.1
    return torch.where(flat, x[..., :1].expand(shape), x)


def strided(x: Tensor, way: int) -> Tensor:
    """The same numbers, otherwise in memory."""
    if way == 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if way == 2:
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    return x


def same(first: object, second: object) -> None:
    """All tensors are equal, bit by bit but for NaN, and so are their dtypes."""
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


class Both:
    """A cache under each kind of page kernels; what is done to one is done to the other."""

    def __init__(self, make: Callable[[PagePool], TokenStore | Tiers | RaggedTiers], nbytes: int):
        self.pools = [
            PagePool(nbytes, poison=True, kernels="torch"),
            PagePool(nbytes, poison=True, kernels="triton", device=DEVICE),
        ]
        self.each = [make(pool) for pool in self.pools]

    @property
    def stores(self) -> Iterator[tuple[TokenStore, TokenStore]]:
        parts = [[one] if isinstance(one, TokenStore) else list(one.parts) for one in self.each]
        return zip(*parts, strict=True)

    def do(self, name: str, *arguments: object) -> object:
        """Do it to both, see that both give the same, and give that."""
        first = getattr(self.each[0], name)(*arguments)
        there = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments]
        same(first, getattr(self.each[1], name)(*there))
        self.check()
        return first

    def make_room(self) -> None:
        """No pool or table grows in a step or two."""
        for pool, one in zip(self.pools, self.each, strict=True):
            pool.reserve(256)
            for store in one.stores:
                store.widen(32)

    def check(self) -> None:
        """All bytes are the same, and the tables, the lengths and the free pages."""
        first, second = self.pools
        assert torch.equal(first.data, second.data.cpu())
        assert torch.equal(first.ring.ids[:-1], second.ring.ids[:-1].cpu())  # the last is nobody's
        assert int(first.ring.start) == int(second.ring.start)
        assert int(first.ring.count) == int(second.ring.count)
        for a, b in self.stores:
            assert a.kernels.__name__ == MODULES["torch"]
            assert b.kernels.__name__ == MODULES["triton"]
            assert torch.equal(a.length, b.length.cpu())
            assert torch.equal(a.pages(), b.pages().cpu())


def one_store(layout: PageLayout, streams: int = 3) -> Both:
    return Both(lambda pool: TokenStore(pool, layout, 1, streams, 1), layout.nbytes)


def codec(kind: str, dim: int) -> Codec:
    """Integers as "bits" or "bits/group", and plain numbers by the name of a dtype."""
    if kind in NAMED:
        return RawCodec(dim, NAMED[kind])
    bits, _, group = kind.partition("/")
    return IntegerCodec(dim, int(bits), int(group or 0))


def form(keys: str, values: str, key: int, value: int) -> TokenFormat:
    return TokenFormat(codec(keys, key), codec(values, value))


class Program:
    """Prompts, steps and beams at random, with all pages looked at after each."""

    def __init__(
        self, both: Both, tiers: int, streams: int, sequences: int, dims: tuple[int, int]
    ) -> None:
        self.both, self.tiers, self.streams, self.dims = both, tiers, streams, dims
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
        key, value, score, place = self.tokens(self.streams, 5)
        tier = self.below(self.tiers + 1, self.streams, 5)
        for i in range(self.tiers):
            every = torch.arange(self.streams)
            self.both.do("append", i, every, key, value, tier == i, score, place)

    def step(self, dtype: torch.dtype = torch.float32) -> None:
        until = self.below(max(self.next, 1), self.streams) if int(self.below(2)) else None
        _, place = self.both.do("weakest", until)
        many = self.tiers + 1
        entering, victim = self.below(many, self.streams), self.below(many, self.streams)
        target = victim + 1 + self.below(self.tiers, self.streams)
        self.both.do(
            "step",
            entering.where(entering < self.tiers, DROP).to(torch.uint8),
            victim.where(victim < self.tiers, NOBODY).to(torch.uint8),
            target.where(target < self.tiers, DROP).to(torch.uint8),
            place,
            *(x[:, 0] for x in self.tokens(self.streams, 1, dtype=dtype)),
        )

    def select(self) -> None:
        self.both.do("select", self.below(self.sequences, self.sequences))

    def run(self, *steps: int, dtypes: list[torch.dtype] = DTYPES) -> None:
        """A prompt, so many steps, and beams; and again."""
        for many in steps:
            self.append()
            for i in range(many):
                self.step(dtypes[i % len(dtypes)])
            self.select()
