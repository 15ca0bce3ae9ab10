"""Prompts in chunks under selectors that score by the last queries: other chunks are not scored."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from kv_evict import KVCompress, SnapKV
from kv_policy import Budget, KVPolicy, LayerView, Observe, compose, parse
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE, Exact

WATCHED: list[int] = []  # queries of each pass that a selector was asked to score
SCORES: list[Tensor] = []  # that it returned
LAST = 8  # queries of all methods but tova and simlayerkv, which observe 1
METHODS = (
    "snapkv:budget=12,window=8,pool=3",
    "ada-snapkv:budget=12,window=8,pool=3",
    "cake:budget=12,window=8,pool=3",
    "chunkkv:budget=12,window=8,chunk=4",
    "kv-compress:rate=2,floor=12,window=8,pool=3",
    "kv-compress:budget=14,window=8,pool=3,layers=even",
    "kv-compress:rate=2,floor=12,window=8,pool=3,short=true",
    "simlayerkv:recent=6,sinks=2",
    "tova:budget=12",
)
STORED = ("raw", "k8v4:window=5")


@dataclass(frozen=True)
class Counting(SnapKV):
    """SnapKV that notes how many queries each of its passes had, and its scores."""

    name: ClassVar[str] = "counting"

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Note the new tokens of a pass, whose layers are scored in one call, and score them."""
        assert view.seen is not None
        WATCHED.append(int(view.fresh.sum(-1).max()))
        SCORES.append(super().score(view))
        return SCORES[-1]


def vectors(tokens: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Draw queries, keys and values of a sequence by layer."""
    draw = torch.Generator().manual_seed(seed)

    def made(*lead: int) -> Tensor:
        return torch.randn(1, SHAPE.kv_heads, *lead, generator=draw)

    group, key, value = SHAPE.group, SHAPE.key_dim, SHAPE.value_dim
    layers = range(SHAPE.layers)
    return [(made(group, tokens, key), made(tokens, key), made(tokens, value)) for _ in layers]


def read(
    cache: PolicyCache, drawn: Sequence[tuple[Tensor, ...]], ends: Sequence[int]
) -> list[Tensor]:
    """Read a prompt in chunks."""
    outs = []
    for first, end in pairwise((0, *ends)):
        left = ends[-1] - end
        cache.begin(torch.ones(1, end - first, dtype=torch.bool), prompt=True, remaining=left)
        for layer, fresh in enumerate(drawn):
            q, k, v = (x[..., first:end, :] for x in fresh)
            outs.append(cache.attend(layer, q, k, v, 0.4))
    return outs


def generate(cache: PolicyCache, count: int) -> list[Tensor]:
    drawn = vectors(count, seed=5)
    outs = []
    for i in range(count):
        cache.begin(torch.ones(1, 1, dtype=torch.bool), prompt=False)
        for layer, fresh in enumerate(drawn):
            outs.append(cache.attend(layer, *(x[..., i : i + 1, :] for x in fresh), 0.4))
    return outs


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=6, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    end=st.integers(LAST, 20),
    seed=st.integers(0, 99),
)
def test_a_last_chunk_of_so_many_queries_replaces_all_scores(
    method: str, stored: str, chunks: list[int], end: int, seed: int
) -> None:
    policy = parse(f"{method}+{stored}")
    sizes = [*chunks, end]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    caches = [PolicyCache(policy, SHAPE, page_tokens=4) for _ in range(2)]
    assert caches[1].selector is not None
    caches[1].selector.scores_last = False  # every chunk is scored
    drawn = vectors(ends[-1], seed)
    some, others = (read(cache, drawn, ends) + generate(cache, 12) for cache in caches)
    for mine, wanted in zip(some, others, strict=True):
        assert torch.equal(mine, wanted)
    a, b = (cache.state().tensors for cache in caches)
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x.nan_to_num(), b[name].nan_to_num()), name


@pytest.mark.parametrize(
    ("sizes", "scored"),
    [
        ((30, 30, 20), [20]),
        ((30, 30, 8), [8]),
        ((30, 30, 7), [30, 7]),  # 23 queries of the second chunk are none of the last 8
        ((40, 3, 2, 4), [3, 2, 4]),
        ((40, 3, 1, 3), [40, 3, 1, 3]),
        ((6,), [6]),
    ],
)
def test_only_chunks_with_some_of_the_last_queries_are_scored(
    sizes: tuple[int, ...], scored: list[int]
) -> None:
    WATCHED.clear()
    policy = compose(Counting(Budget(12), window=LAST, pool=3), Exact(1))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    read(PolicyCache(policy, SHAPE, page_tokens=4), vectors(ends[-1], 1), ends)
    assert scored == WATCHED


def test_queries_before_the_last_do_not_count() -> None:
    """Chunks of 3 and 5 queries give tokens before them the scores of a chunk with both."""
    policy = compose(Counting(Budget(12), window=LAST, pool=1), Exact(1))
    drawn, found = vectors(48, 2), []
    for ends in ((40, 43, 48), (40, 48)):
        SCORES.clear()
        read(PolicyCache(policy, SHAPE, page_tokens=4), drawn, ends)
        found.append(SCORES[-1][..., : 40 - LAST])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stored", STORED)
def test_a_second_prompt_in_chunks_forgets_the_scores_of_the_first(stored: str) -> None:
    policy = parse(f"kv-compress:rate=2,floor=12,window=8,pool=3+{stored}")
    first, second = vectors(50, 3), vectors(60, 4)
    caches = [PolicyCache(policy, SHAPE, page_tokens=4) for _ in range(2)]
    assert caches[1].selector is not None
    caches[1].selector.scores_last = False  # every chunk is scored
    found = []
    for cache in caches:
        read(cache, first, (30, 50))
        generate(cache, 3)
        found.append(read(cache, second, (20, 45, 60)) + generate(cache, 5))
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted)


def test_nothing_is_observed_of_a_chunk_that_is_not_scored() -> None:
    caches = {
        text: PolicyCache(parse(text), SHAPE, page_tokens=4, replays=False)
        for text in (
            "kv-compress:rate=2,floor=12,window=8",
            "h2o:budget=12",
            "leankv:high=raw,low=raw",
        )
    }
    watched: dict[str, list[bool]] = {}
    for text, cache in caches.items():
        for first, end, left in ((0, 20, 30), (20, 40, 10), (40, 44, 6), (44, 50, 0)):
            here = torch.ones(1, end - first, dtype=torch.bool)
            cache.begin(here, prompt=True, remaining=left)
            watched.setdefault(text, []).append(cache.observe != Observe())
            for layer, fresh in enumerate(vectors(50, 1)):
                cache.attend(layer, *(x[..., first:end, :] for x in fresh), 0.4)
    assert [*watched.values()] == [[False, False, True, True], [True] * 4, [True] * 4]


@pytest.mark.parametrize(("columns", "remaining"), [(5, 4), (9, 0), (1, 0)])
def test_a_prompt_with_fewer_tokens_than_were_said_is_refused(columns: int, remaining: int) -> None:
    policy = parse("kv-compress:rate=2,floor=12,window=8")
    cache, drawn = PolicyCache(policy, SHAPE, page_tokens=4), vectors(60, 1)
    told = deepcopy(cache)
    told.begin(torch.ones(1, 20, dtype=torch.bool), prompt=True, remaining=10)
    for layer, fresh in enumerate(drawn):
        told.attend(layer, *(x[..., :20, :] for x in fresh), 0.4)
    here = torch.ones(1, columns, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"had remaining=10, but {columns + remaining} tokens"):
        told.begin(here, prompt=True, remaining=remaining)
    with pytest.raises(ValueError, match="remaining is -1; give a number of tokens, or 0"):
        cache.begin(here, prompt=True, remaining=-1)
    told.begin(torch.ones(1, 10, dtype=torch.bool), prompt=True)  # nothing has changed


def test_an_unfinished_prompt_is_not_compressed() -> None:
    policy: KVPolicy = compose(KVCompress(budget=Budget(12), window=LAST, short=True), Exact(1))
    cache, drawn = PolicyCache(policy, SHAPE, page_tokens=4), vectors(60, 1)
    read(cache, drawn, (60,))
    generate(cache, 9)
    later = deepcopy(cache)
    later.begin(torch.ones(1, 20, dtype=torch.bool), prompt=True, remaining=10)
    for layer, fresh in enumerate(vectors(20, 2)):
        later.attend(layer, *fresh, 0.4)
    assert later.compress() == []
    assert cache.compress() == [0]
