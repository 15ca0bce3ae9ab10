"""Scores that go on in their pages are those that the selector gives when it is asked."""

from dataclasses import dataclass

import pytest
import torch

from kv_evict import LeanKV
from kv_serve.tiered import TieredCache
from tiered_policies import SHAPE
from tiered_world import one, ragged


@dataclass(frozen=True)
class Asked(LeanKV):
    """Says nothing of its scores, so that it is asked about every token."""

    @property
    def averages(self) -> None:
        return None


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("last", [None, 4])
def test_means_in_pages_are_what_the_selector_says(window: int, last: int | None) -> None:
    torch.manual_seed(7)
    caches = [
        TieredCache(
            kind(high="raw", low="raw", window=window, last=last, t_high=0.5, t_low=0.1),
            SHAPE,
            page_tokens=4,
        )
        for kind in (LeanKV, Asked)
    ]
    passes = [ragged(31, 18), *(one() for _ in range(9)), torch.tensor([[True], [False]])]
    for valid in (*passes, *(one() for _ in range(5))):
        for cache in caches:
            cache.begin(valid)
        for layer in range(SHAPE.layers):
            lead = len(valid), SHAPE.kv_heads
            query = torch.randn(*lead, SHAPE.group, valid.shape[1], SHAPE.key_dim)
            key, value = (
                torch.randn(*lead, valid.shape[1], dim) for dim in (SHAPE.key_dim, SHAPE.value_dim)
            )
            ours, theirs = (cache.attend(layer, query, key, value, 1.0) for cache in caches)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    batches = [cache.batch for cache in caches]
    for mine, other in zip(*(batch.stores for batch in batches), strict=True):
        for layer in range(SHAPE.layers):
            read, wanted = mine.read_layer(layer), other.read_layer(layer)
            assert torch.equal(read.position, wanted.position)
            assert read.held.any()
            torch.testing.assert_close(read.score, wanted.score, rtol=1e-5, atol=1e-7)
