"""The cache under selectors, against attention over the very tokens it says it keeps."""

from dataclasses import replace

import pytest
import torch

from kv_policy import Budget, Rope, best, compose, parse
from kv_runtime.cache import PolicyCache
from tiered_policies import POLICIES, SHAPE, ByKey, Exact, Ladder
from tiered_world import World, one, ragged


@pytest.mark.parametrize("name", POLICIES)
def test_attention_is_over_the_tokens_that_are_kept(name: str) -> None:
    world = World(POLICIES[name])
    world.forward(ragged(31, 18))
    for _ in range(9):
        world.forward(one())
    world.forward(ragged(3, 11))
    for _ in range(9):
        world.forward(one())
    world.cache.select(torch.tensor([1, 1, 0]))
    world.sequences = 3
    chosen = torch.tensor([1, 1, 0])
    world.key, world.value = world.key[:, chosen], world.value[:, chosen]
    world.seen = world.seen[chosen]
    for _ in range(6):
        world.forward(one(3))


@pytest.mark.parametrize("window", [0, 5])
def test_blocks_without_a_selector_give_what_single_tokens_give(window: int) -> None:
    torch.manual_seed(3)
    lead = (SHAPE.layers, 2, 2, 60)
    query, key, value = (torch.randn(*lead, d) for d in (6, 6, 5))
    caches = [PolicyCache(Exact(1, window, block), SHAPE, page_tokens=4) for block in (1, 4)]
    start = 0
    for width in (21, 1, 1, 1, 1, 1, 3, 1):
        at = slice(start, start + width)
        for cache in caches:
            cache.begin(torch.ones(2, width, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            one, other = (
                cache.attend(
                    layer,
                    query[layer, :, :, None, at],
                    key[layer, :, :, at],
                    value[layer, :, :, at],
                    1.0,
                )
                for cache in caches
            )
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        start += width
    alone, together = (cache.batch for cache in caches)
    assert together.tiers.in_blocks
    assert torch.equal(alone.tiers.counts(), together.tiers.counts())
    together.tiers.check()


@pytest.mark.parametrize("window", [0, 5])
def test_streaming_holds_its_sinks_and_the_newest(window: int) -> None:
    policy = parse("streaming:budget=12,sinks=2")
    world = World(compose(policy, Exact(1, window)) if window else policy)
    world.forward(ragged(31, 7))
    for step in range(20):
        world.forward(one())
        for layer in range(SHAPE.layers):
            kept = world.kept(layer)
            for b in range(2):
                n = int(world.seen[b])
                want = set(range(min(n, 2))) | set(range(max(0, n - 10 - window), n))
                got = set(kept[b, 0].nonzero().flatten().tolist())
                assert got == want, (step, b)
                assert torch.equal(kept[b, 0], kept[b, 1])


def test_the_best_are_kept_and_the_budget_is_met_per_sequence() -> None:
    world = World(ByKey(Budget(10)), budgets=[None, Budget(4)])
    world.forward(ragged(31, 25))
    for layer in range(SHAPE.layers):
        for b, budget in enumerate((10, 4)):
            score = world.key[layer, b, :, : int(world.seen[b]), 0].clone()
            score[:, 0] = torch.inf
            want = best(score, torch.full((2,), budget))
            assert torch.equal(world.kept(layer)[b, :, : score.shape[1]], want)


def test_a_budget_over_all_layers_is_spent_where_scores_are_high() -> None:
    world = World(ByKey(Budget(10), whole=True))
    world.key[1, ..., 0] += 10
    world.forward(ragged(31, 25))
    tokens = world.cache.memory().tokens
    assert (tokens.sum((0, 2)) == 10 * 3 * 2).all()
    assert (tokens[1] > tokens[0]).all()


def test_a_share_of_the_prompt_and_bytes_per_token() -> None:
    world = World(ByKey(Budget(50, "percent")))
    world.forward(ragged(32, 20))
    assert world.cache.memory().tokens[0, :, 0].tolist() == [16, 10]
    record = 3 * 2 * (4 * 11 + 8)
    world = World(ByKey(Budget(record / 4, "bytes")))
    world.forward(ragged(32, 20))
    assert world.cache.memory().tokens[0, :, 0].tolist() == [8, 5]


def test_a_ladder_keeps_its_tiers_full_and_bounded() -> None:
    world = World(compose(Ladder(high=4, low=6), Exact(2)))
    world.forward(ragged(31, 28))
    for _ in range(15):
        world.forward(one())
        high, low = (s.length for s in world.cache.batch.stores)
        assert int(high.min()) >= 4
        assert int(high.max()) <= 5
        assert int(low.max()) <= 6 + 15


def test_pages_are_reused_and_none_is_lost() -> None:
    world = World(parse("streaming:budget=12,sinks=2"), pages=40)
    world.forward(ragged(16, 16))
    used = world.cache.memory().pages_used
    for _ in range(50):  # the budget goes through all pages four times
        world.forward(one())
    assert world.cache.memory().pages_used <= used
    assert world.cache.memory().pages_used == 3 * 2 * 2 * 3


@pytest.mark.parametrize("policy", ["h2o:budget=10", "scissorhands:budget=10,window=9,recent=5"])
def test_the_newest_tokens_are_no_victims_and_the_budget_is_held(policy: str) -> None:
    world = World(parse(policy))
    world.forward(ragged(30, 7))
    for _ in range(20):
        world.forward(one())
        for layer in range(SHAPE.layers):
            held = world.kept(layer)
            assert int(held.sum(-1).max()) <= 10
            for b, seen in enumerate(world.seen.tolist()):
                assert bool(held[b, :, max(0, seen - 5) : seen].all())


def test_queries_are_given_to_whoever_reads_them_and_refused_without_a_rope() -> None:
    with pytest.raises(ValueError, match="needs the model's rotary embedding"):
        PolicyCache(parse("expected-attention:budget=12"), SHAPE)
    shape = replace(SHAPE, rope=Rope((1.0, 0.1, 0.01)))
    cache = PolicyCache(parse("expected-attention:budget=12"), shape, page_tokens=4)
    for width in (40, 1):
        cache.begin(torch.ones(1, width, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            cache.attend(
                layer,
                torch.randn(1, 2, 2, width, 6),
                torch.randn(1, 2, width, 6),
                torch.randn(1, 2, width, 5),
                0.4,
            )
    assert cache.memory().tokens.unique().tolist() == [13]
