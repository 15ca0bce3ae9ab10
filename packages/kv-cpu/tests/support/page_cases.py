"""The same operations on two caches, one with page kernels in torch and one with native ones."""

from collections.abc import Callable, Iterator

import torch
from hypothesis import strategies as st
from torch import Tensor

from kv_paging import PagePool, RaggedTiers, Tiers, TokenStore
from kv_paging.kernels import MODULES
from kv_policy import Codec, PageLayout, RawCodec, TokenFormat
from kv_quant.integer import IntegerCodec

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EDGES = [
    *(0.0, -0.0, 1e-10, -1e-10, 2**-24, -(2**-24), 2**-25, 1e-40, -1e-40, 6.1e-5, -6.2e-5),
    *(1.0, -1.0, 1 + 2**-11, 32752.0, -32752.0, 32753.0, 65504.0, -65519.0, 65520.0, 3e38, -3e38),
]
STRANGE = [torch.inf, -torch.inf, torch.nan]


def integers(dim: int) -> st.SearchStrategy[IntegerCodec]:
    group = st.one_of(st.just(0), st.integers(1, dim + 2))
    return st.builds(IntegerCodec, st.just(dim), st.sampled_from([8, 4, 2, 1]), group)


def codecs(dim: int) -> st.SearchStrategy[Codec]:
    raw = st.builds(RawCodec, st.just(dim), st.sampled_from(DTYPES))
    return st.one_of(integers(dim), integers(dim), raw)


DIMS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 128, 130, 257]))
FORMATS = st.tuples(DIMS, DIMS).flatmap(
    lambda dims: st.builds(TokenFormat, codecs(dims[0]), codecs(dims[1]))
)


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
    if way == 3:
        return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    return x


class Both:
    """A cache under each kind of page kernels; what is done to one is done to the other."""

    def __init__(self, make: Callable[[PagePool], TokenStore | Tiers | RaggedTiers], nbytes: int):
        self.pools = {
            name: PagePool(nbytes, poison=True, kernels=name) for name in ("torch", "cpu")
        }
        self.each = {name: make(pool) for name, pool in self.pools.items()}

    @property
    def stores(self) -> Iterator[tuple[TokenStore, TokenStore]]:
        def parts(name: str) -> list[TokenStore]:
            one = self.each[name]
            return [one] if isinstance(one, TokenStore) else list(one.parts)

        return zip(parts("torch"), parts("cpu"), strict=True)

    def do(self, name: str, *arguments: object) -> list[object]:
        return [getattr(one, name)(*arguments) for one in self.each.values()]

    def check(self) -> None:
        """All bytes are the same, and the tables, the lengths and the free pages."""
        first, second = self.pools.values()
        assert torch.equal(first.data, second.data)
        assert torch.equal(first.ring.ids[:-1], second.ring.ids[:-1])  # the last is nobody's
        assert torch.equal(first.ring.start, second.ring.start)
        assert torch.equal(first.ring.count, second.ring.count)
        for a, b in self.stores:
            assert a.kernels.__name__ == MODULES["torch"]
            assert b.kernels.__name__ == MODULES["cpu"]
            assert torch.equal(a.length, b.length)
            assert torch.equal(a.pages(), b.pages())


def one_store(layout: PageLayout, streams: int = 3) -> Both:
    return Both(lambda pool: TokenStore(pool, layout, 1, streams, 1), layout.nbytes)
