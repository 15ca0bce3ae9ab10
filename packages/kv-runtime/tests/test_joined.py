"""States of several caches in one: every token as it was stored, in the order of the caches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_policy import Budget, compose, parse
from kv_runtime import CacheState, DamagedStateError, PolicyCache
from passes import Passes, expect_alike, filled
from tiered_policies import SHAPE, Exact, Turned
from tiered_world import ragged

WHOLE = ("raw", "k8v4", "k4v2")  # formats that keep every token
SELECTORS = (
    "keydiff:budget=9+k8v4",
    "snapkv:budget=8,window=3+k4v4",
    "streaming:budget=7",
    "kv-compress:keep=40%,window=4,recent=4+k8v4",
)


def read(text: str, seeds: tuple[int, ...], lengths: tuple[int, ...]) -> PolicyCache:
    """Feed one cache the prompts that caches of their own read, one after another."""
    cache = PolicyCache(parse(text), SHAPE, page_tokens=4)
    for seed in seeds:
        Passes(seed).over([cache], ragged(*lengths))
    return cache


def states(text: str, seeds: tuple[int, ...], lengths: tuple[int, ...]) -> list[CacheState]:
    return [read(text, (seed,), lengths).state() for seed in seeds]


def loaded(text: str, each: list[CacheState], page_tokens: int = 4) -> PolicyCache:
    cache = PolicyCache(parse(text), SHAPE, page_tokens=page_tokens)
    cache.restore(*each)
    return cache


@given(
    text=st.sampled_from(WHOLE),
    documents=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 21), min_size=1, max_size=3),
)
@settings(max_examples=20)
def test_without_a_selector_it_is_the_cache_that_read_all(
    text: str, documents: int, lengths: list[int]
) -> None:
    seeds = tuple(range(3, 3 + documents))
    want = read(text, seeds, tuple(lengths))
    got = loaded(text, states(text, seeds, tuple(lengths)))
    assert got.facts() == want.facts()
    for name, x in want.state().tensors.items():
        assert torch.equal(got.state().tensors[name], x), name
    expect_alike([want, got], seed=2)


@pytest.mark.parametrize("text", SELECTORS)
def test_a_selector_holds_what_each_document_held(text: str) -> None:
    each = states(text, (3, 4), (29, 11))
    cache = loaded(text, each)
    first, second = (loaded(text, [one]).memory().tokens for one in each)
    assert torch.equal(cache.memory().tokens, first + second)
    found = cache.state().tensors
    for i in range(2):  # in a table row the first document's slots come first
        of = [e.tensors["store.0.length"].flatten()[i] for e in each]
        begin = int(found["store.0.length"].flatten()[:i].sum())
        got = found["store.0.position"][begin : begin + int(sum(of))]
        mine = [
            e.tensors["store.0.position"][int(e.tensors["store.0.length"].flatten()[:i].sum()) :][
                : int(n)
            ]
            for e, n in zip(each, of, strict=True)
        ]
        assert torch.equal(got, torch.cat((mine[0], mine[1] + 29)))  # rows of sequence 0
    if not text.startswith("kv-compress"):  # which frees whole pages
        expect_alike([cache, loaded(text, each, page_tokens=16)], seed=2, near=1e-9)


def test_the_budget_of_the_whole_is_of_all_its_tokens() -> None:
    cache = loaded("keydiff:budget=50%", states("keydiff:budget=50%", (3, 4, 5), (20, 8)))
    assert cache.state().tensors["plan.budget"].tolist() == [30, 12]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("k8v4:window=4", "has a raw window of 4 tokens"),
        ("k8v4:keys=channel", "stores several tokens as a block"),
        ("h2o:budget=8", "adds up the attention that tokens receive"),
        ("fastgen", "thresholds, which are those of one prompt"),
    ],
)
def test_what_is_of_one_prompt_is_refused(text: str, reason: str) -> None:
    each = states(text, (3, 4), (9,))
    with pytest.raises(ValueError, match=reason):
        loaded(text, each)
    loaded(text, each[:1])


def test_states_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="of 2 and 1 sequences"):
        loaded("k8v4", [*states("k8v4", (3,), (9, 4)), *states("k8v4", (3,), (9,))])
    one, other = states("keydiff:budget=4", (3, 4), (9,))
    own = replace(other, facts=replace(other.facts, budgets=(str(Budget(3)),)))
    with pytest.raises(ValueError, match="have different budgets"):
        loaded("keydiff:budget=4", [one, own])
    seen = {**other.tensors, "seen": other.tensors["seen"] + 1}
    with pytest.raises(DamagedStateError):
        loaded("keydiff:budget=4", [one, replace(other, tensors=seen)])


def test_heads_of_several_kinds_follow_each_other() -> None:
    policy = compose(Exact(1, 0), Turned("6253", "154"))
    caches = [filled(policy, (17, 6), steps) for steps in (0, 3)]
    cache = PolicyCache(policy, SHAPE, page_tokens=4)
    cache.restore(*[each.state() for each in caches])
    tokens = [each.memory().tokens for each in caches]
    assert torch.equal(cache.memory().tokens, sum(tokens))
    assert cache.batch is not None
    cache.batch.pool.check(cache.batch.pages())
