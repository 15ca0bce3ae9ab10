"""The same operations on two caches: one with page kernels in torch, one with others."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kv_paging import PagePool, PerHeadRankTiers, Tiers, TokenStore
from kv_policy import PageLayout

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EDGES = [
    *(0.0, -0.0, 1e-10, -1e-10, 2**-24, -(2**-24), 2**-25, 1e-40, -1e-40, 6.1e-5, -6.2e-5),
    *(1.0, -1.0, 1 + 2**-11, 32752.0, -32752.0, 32753.0, 65504.0, -65519.0, 65520.0, 3e38, -3e38),
]
MODULES = {
    "torch": "kv_paging.torch_kernels",
    "triton": "kv_paging.triton_kernels",
    "cpu": "kv_cpu.pages",
}
STRANGE = [torch.inf, -torch.inf, torch.nan]


def vectors(generator: torch.Generator, *shape: int, strange: bool = False) -> Tensor:
    """Draw numbers of all sizes, some at the limits; whole rows may be equal."""
    x = torch.randn(shape, generator=generator)
    x = x * torch.pow(10.0, torch.randint(-9, 5, (*shape[:-1], 1), generator=generator))
    edges = torch.tensor(EDGES + (STRANGE if strange else []))
    drawn = edges[torch.randint(0, len(edges), shape, generator=generator)]
    x = x.where(torch.rand(shape, generator=generator) < 0.8, drawn)
    flat = torch.rand((*shape[:-1], 1), generator=generator) < 0.1
    return torch.where(flat, x[..., :1].expand(shape), x)


def strided(x: Tensor, way: int) -> Tensor:
    """Return the same numbers with another memory layout."""
    if way == 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if way == 2:
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if way == 3:
        return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    return x


class Twins:
    """A cache with torch's page kernels on a CPU, and one with named kernels on a device."""

    def __init__(
        self,
        make: Callable[[PagePool], TokenStore | Tiers | PerHeadRankTiers],
        nbytes: int,
        kernels: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self.names, self.device = ("torch", kernels), torch.device(device)
        places = ("cpu", device)
        self.pools = [
            PagePool(nbytes, poison=True, kernels=name, device=place)
            for name, place in zip(self.names, places, strict=True)
        ]
        self.each = [make(pool) for pool in self.pools]

    @property
    def stores(self) -> Iterator[tuple[TokenStore, TokenStore]]:
        parts = [[one] if isinstance(one, TokenStore) else list(one.parts) for one in self.each]
        return zip(*parts, strict=True)

    def do(self, name: str, *arguments: object) -> list[object]:
        """Call a method of both, and return both results."""
        there = [x.to(self.device) if isinstance(x, Tensor) else x for x in arguments]
        first, second = self.each
        return [getattr(first, name)(*arguments), getattr(second, name)(*there)]

    def check(self) -> None:
        """Check that all bytes, tables, lengths and free pages are equal."""
        first, second = self.pools
        assert torch.equal(first.data, second.data.cpu())
        assert torch.equal(first.ring.ids[:-1], second.ring.ids[:-1].cpu())  # the last is unused
        assert int(first.ring.start) == int(second.ring.start)
        assert int(first.ring.count) == int(second.ring.count)
        for pair in self.stores:
            wanted = [MODULES[name] for name in self.names]
            assert [one.kernels.__name__ for one in pair] == wanted
            assert torch.equal(pair[0].length, pair[1].length.cpu())
            assert torch.equal(pair[0].pages(), pair[1].pages().cpu())


def one_store(
    layout: PageLayout, table_rows: int, kernels: str, device: torch.device | str = "cpu"
) -> Twins:
    """Return twins of a store."""
    return Twins(
        lambda pool: TokenStore(pool, layout, 1, table_rows, 1), layout.nbytes, kernels, device
    )
