"""Scores that attention updates in pages in a decode step are those of the separate update."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kv_evict import H2O
from kv_paging import PagePool
from kv_policy import Budget, CacheShape, Observe, complete, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.retain.selected import KeepSelected
from kv_runtime.stats import Tally
from kv_runtime.token_rows import TokenRows

SHAPE = CacheShape(layers=2, kv_heads=2, group=2, key_dim=16, value_dim=16, dtype=torch.bfloat16)
POLICIES = [
    "leankv:window=4,last=none",
    "leankv:window=8,last=16,low=drop,t_high=0.3",
    "leankv:group=mean,window=0",
    "h2o:budget=24+k8v4",
    "kv-compress:rate=2,every=5,window=8+k8v4",
]


def generated(policy: str, *, native: bool, sequences: int = 3) -> tuple[list[Tensor], PolicyCache]:
    """Read prompts of several lengths and generate, in pages of a shared pool."""
    page_bytes = PolicyCache(parse(policy), SHAPE).layout.page_bytes
    pool = PagePool(page_bytes, kernels="cpu", poison=True)
    cache = PolicyCache(parse(policy), SHAPE, backend="cpu", pool=pool)
    if not native:
        cache._decode_rows = None
    g, found = torch.Generator().manual_seed(4), []
    heads, dim = SHAPE.kv_heads, SHAPE.key_dim
    here = torch.arange(40) >= torch.tensor([[0], [9], [31]])[:sequences]
    cache.begin(here, prompt=True)
    for layer in range(SHAPE.layers):
        query = torch.randn(sequences, heads, SHAPE.group, 40, dim, generator=g).bfloat16()
        key, value = torch.randn(2, sequences, heads, 40, dim, generator=g).bfloat16()
        cache.attend(layer, query, key, value, 0.3)
    for step in range(16):
        absent = step % 5 == 2  # then the last sequence has no new token
        rows = [*range(sequences - 1), -1 if absent else sequences - 1]
        part = TokenRows.one_each(cache, rows, torch.device("cpu"))
        part.begin(prompt=False)
        for layer in range(SHAPE.layers):
            query = torch.randn(sequences, heads * SHAPE.group, dim, generator=g).bfloat16()
            key, value = torch.randn(2, sequences, heads, dim, generator=g).bfloat16()
            output = torch.zeros_like(query)
            part.attend(layer, query, key, value, 0.3, output)
            found.append(output.float())
        cache.count()
    return found, cache


@dataclass(frozen=True)
class Squares(H2O):
    """A selector that reads more than attention mass."""

    name = "squares"

    @property
    def observe(self) -> Observe:
        """Of every query."""
        return replace(super().observe, also=frozenset({"squares"}))


def test_scores_that_depend_on_more_than_the_mass_are_left_to_the_selector() -> None:
    """Attention updates scores by the mass alone."""
    running = [
        KeepSelected(complete(kind(Budget(24))), SHAPE, None, Tally()).running
        for kind in (H2O, Squares)
    ]
    assert [each is None for each in running] == [False, True]


@pytest.mark.parametrize("policy", POLICIES)
def test_attention_updates_scores_as_the_selector_says(policy: str) -> None:
    outputs, mine = generated(policy, native=True)
    wanted, other = generated(policy, native=False)
    for here, there in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(here, there, rtol=2e-2, atol=2e-2)
    assert mine.batch is not None
    assert other.batch is not None
    for (_, ours), (_, theirs) in zip(mine.batch.held_stores, other.batch.held_stores, strict=True):
        assert torch.equal(ours.length, theirs.length)
        a, b = (store.read_layers(slice(None)) for store in (ours, theirs))
        assert a.score is not None
        assert b.score is not None
        assert torch.equal(a.position, b.position)
        torch.testing.assert_close(a.score, b.score, rtol=1e-3, atol=1e-5)
