"""Scores that go on in their pages are those that the selector gives when it is asked."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kv_evict import H2O, KVCompress, LeanKV
from kv_policy import Budget, KVPolicy, LayerView
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE
from tiered_world import one, ragged


class Silent:
    """Says nothing of its scores, so that it is asked about every token."""

    @property
    def running(self) -> None:
        return None


@dataclass(frozen=True)
class AskedLeanKV(Silent, LeanKV):
    pass


@dataclass(frozen=True)
class AskedH2O(Silent, H2O):
    pass


@dataclass(frozen=True)
class AskedKVCompress(Silent, KVCompress):
    pass


def leankv(last: int | None, window: int) -> list[KVPolicy]:
    kinds = (LeanKV, AskedLeanKV)
    more = {"high": "raw", "low": "raw", "t_high": 0.5, "t_low": 0.1}
    return [kind(window=window, last=last, **more) for kind in kinds]


def kv_compress(window: int | str) -> list[KVPolicy]:
    kinds = (KVCompress, AskedKVCompress)
    more = {"floor": 9, "skip": 4, "recent": 3, "pool": 3, "every": 4}
    return [kind(rate=2, window=window, **more) for kind in kinds]


@dataclass(frozen=True)
class OfNewTokens(H2O):
    """Refuses to be asked about a stored token while tokens are generated."""

    def score(self, view: LayerView) -> Tensor:
        assert not view.generated or view.fresh.all()
        return super().score(view)


def drawn(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A query, key and value of a layer."""
    lead, length = (len(valid), SHAPE.kv_heads), valid.shape[1]
    query = torch.randn(*lead, SHAPE.group, length, SHAPE.key_dim)
    key, value = (torch.randn(*lead, length, dim) for dim in (SHAPE.key_dim, SHAPE.value_dim))
    return query, key, value


def test_a_selector_that_says_how_scores_go_on_is_asked_about_new_tokens_alone() -> None:
    torch.manual_seed(7)
    cache = PolicyCache(OfNewTokens(budget=Budget(8, "tokens")), SHAPE, page_tokens=4)
    for valid in (ragged(31, 18), *(one() for _ in range(4))):
        cache.begin(valid)
        for layer in range(SHAPE.layers):
            assert cache.attend(layer, *drawn(valid), 1.0).isfinite().all()


@pytest.mark.parametrize(
    "policies",
    [
        *(leankv(last, window) for last in (None, 4) for window in (0, 5)),
        [kind(budget=Budget(8, "tokens")) for kind in (H2O, AskedH2O)],
        *(kv_compress(window) for window in (4, "full")),
    ],
    ids=("leankv", "leankv-5", "leankv-4", "leankv-4-5", "h2o", "kv-compress", "kv-compress-full"),
)
def test_scores_in_pages_are_what_the_selector_says(policies: list[KVPolicy]) -> None:
    torch.manual_seed(7)
    caches = [PolicyCache(policy, SHAPE, page_tokens=4) for policy in policies]
    passes = [ragged(31, 18), *(one() for _ in range(9)), torch.tensor([[True], [False]])]
    for valid in (*passes, *(one() for _ in range(5))):
        for cache in caches:
            cache.begin(valid)
        for layer in range(SHAPE.layers):
            given = drawn(valid)
            ours, theirs = (cache.attend(layer, *given, 1.0) for cache in caches)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    batches = [cache.batch for cache in caches]
    for mine, other in zip(*(batch.stores for batch in batches), strict=True):
        for layer in range(SHAPE.layers):
            read, wanted = mine.read_layer(layer), other.read_layer(layer)
            assert torch.equal(read.position, wanted.position)
            assert read.held.any()
            torch.testing.assert_close(read.score, wanted.score, rtol=1e-5, atol=1e-7)
