"""A policy that reads some pages, caches under it, and selections checked as they are made."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kv_attention import PageBounds, select_pages
from kv_attention.page_bounds import decoded_keys
from kv_attention.reading_reference import select_pages as by_definition
from kv_paging import PagePool
from kv_policy import Budget, KVPolicy, PagedTokens, PageReading, Part, RankedBy
from kv_policy.key_codes import code_rotation
from kv_runtime import Bases, Layout
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE


@dataclass(frozen=True)
class Reads(Part):
    """Reads a number of tokens in pages, and no page in particular."""

    name: ClassVar[str] = "reads"
    tokens: int = 0  # 0: all
    whole: int = 0
    by: RankedBy = "bounds"

    @property
    def reading(self) -> PageReading:
        budget = Budget(self.tokens) if self.tokens else Budget(100, "percent")
        return PageReading(budget, whole_layers=self.whole, by=self.by)


@dataclass
class Watched:
    """Selections as they are made, each compared with its definition.

    What is not read becomes NaN, in a copy of the pages.
    """

    calls: int = 0
    fewer: int = 0
    poison: bool = True

    def __call__(
        self,
        q: Tensor,
        pages: PagedTokens,
        bounds: PageBounds,
        reading: PageReading,
        backend: str,
    ) -> PagedTokens:
        self.calls += 1
        tokens = pages.layout.tokens
        assert bounds.count.tolist() == (pages.length.long() // tokens).tolist()
        found = select_pages(q, pages, bounds, reading, backend)
        expected = by_definition(q, pages, bounds, reading)
        assert found.length.tolist() == expected.length.tolist()
        if found is pages:
            assert expected is pages
            return pages
        self.fewer += 1
        held = (found.length.long() + tokens - 1) // tokens
        data = torch.full_like(pages.data, 255)
        for b, h in torch.cartesian_prod(*map(torch.arange, held.shape)).tolist():
            mine = found.table[b, h, : held[b, h]].tolist()
            assert mine == expected.table[b, h, : held[b, h]].tolist()
            data[mine] = pages.data[mine]
        return replace(found, data=data) if self.poison else found


def over_pool(policy: KVPolicy, page_tokens: int = 4, backend: str = "torch") -> PolicyCache:
    """Return a cache over a poisoned pool that others may share."""
    size = Layout.of(policy, SHAPE, bases_of(policy), page_tokens, pooled=True).page_bytes
    memory = torch.full((900, size), 255, dtype=torch.uint8)
    pool = PagePool.over(memory, poison=True)
    return PolicyCache(policy, SHAPE, page_tokens=page_tokens, backend=backend, pool=pool)


def bases_of(policy: KVPolicy) -> Bases | None:
    return None if policy.basis is None else Bases.of(policy.basis, SHAPE, torch.device("cpu"))


def check_bounds(cache: PolicyCache) -> None:
    """Compare the bounds, or the codes, with the keys that are stored."""
    store = cache.batch.tiers.parts[0]
    tokens, found = store.layout.tokens, store.read(store.table_rows(), frozenset({"keys"}))
    both, dim = store.bounds.both, found.key.shape[-1]
    if store.bounds.in_pages:
        both = both[store.page_table.ids.long()]
    coded = both.dtype == torch.uint8
    rotation = code_rotation(dim, torch.device("cpu"))
    high, low = (both, both) if coded else both.float().chunk(2, -1)
    for row, count in enumerate(store.bounds.count.tolist()):
        for at in range(count):
            slots = slice(at * tokens, (at + 1) * tokens)
            keys = found.key[row, slots][found.held[row, slots]]
            if coded:  # the product with the key itself is exact
                mine = decoded_keys(both[row, at][None, None, None], dim, tokens)[0, 0, 0]
                mine = mine[found.held[row, slots]] * (keys.float() @ rotation)
                size = keys.float().square().sum(-1)
                torch.testing.assert_close(mine.sum(-1), size, rtol=2e-3, atol=1e-5)
                continue
            assert (keys <= high[row, at]).all()
            assert (keys >= low[row, at]).all()


def steps(cache: PolicyCache, passes: object) -> list[Tensor]:
    """Run passes of random vectors; return the outputs of their last columns."""
    found = []
    for valid in passes:
        sequences, width = valid.shape
        cache.begin(valid)
        for layer in range(SHAPE.layers):
            query = torch.randn(sequences, 2, 2, width, 6)
            key, value = torch.randn(sequences, 2, width, 6), torch.randn(sequences, 2, width, 5)
            out = cache.attend(layer, query, key, value, 0.4)
        found.append(out[..., -1, :])
    return found
