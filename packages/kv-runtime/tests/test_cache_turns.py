"""Prompts that are compressed together, in turns, or because the pool of pages runs dry."""

import pytest

from kv_paging import PoolExhausted
from kv_policy import parse
from tiered_policies import SHAPE
from tiered_world import World, filled, one, places, ragged


@pytest.mark.parametrize(
    "policy",
    [
        "kv-compress:budget=12,window=4,recent=4,every=4",
        "kv-compress:rate=3,floor=8,window=full,skip=2",
        "kv-compress:budget=12,window=4,recent=4+leankv:high=raw,low=raw,window=3,t_high=0.4",
        "h2o:budget=9",
        "cake:budget=12,window=4",
    ],
)
def test_sequences_compressed_together_keep_what_they_keep_alone(policy: str) -> None:
    lengths = [37, 9, 52]
    together = filled(policy, lengths, slice(None), steps=9)
    for b in range(3):
        alone = filled(policy, lengths, slice(b, b + 1), steps=9)
        assert places(together, b) == places(alone, 0)


def test_a_plan_takes_as_many_tokens_as_it_may_and_the_rest_waits() -> None:
    budget, heads = 12, SHAPE.layers * SHAPE.kv_heads
    policy = f"kv-compress:budget={budget},window=4,recent=4,most={60 * heads}"
    world = World(parse(policy), sequences=3)
    world.forward(ragged(40, 30, 35))

    def held() -> list[int]:
        return world.cache.memory().tokens.sum((0, 2)).tolist()

    assert held()[1:] == [30 * heads, 35 * heads]  # 40 + 30 is too much
    assert held()[0] <= budget * heads
    world.forward(one(3))
    assert held()[1] <= budget * heads
    assert held()[2] == 36 * heads
    world.forward(one(3))
    assert held()[2] <= budget * heads
    memory = world.cache.memory()
    assert memory.pages_free <= memory.pages_used  # what they left is memory given back
    before = held()
    world.forward(one(3))
    assert held() == [n + heads for n in before]  # nobody waits any more


def test_a_pool_that_runs_dry_is_compressed_or_exhausted() -> None:
    text, pages = "kv-compress:budget=12,window=4,recent=4", 56
    dry = World(parse(text), pages=pages)
    dry.forward(ragged(20, 20))
    with pytest.raises(PoolExhausted):
        dry.go_on(40)
    short = World(parse(f"{text},short=true"), pages=pages)
    short.forward(ragged(20, 20))
    short.go_on(40)
    assert short.cache.batch.pool.capacity == pages


def test_a_pool_too_small_for_the_budget_is_exhausted_all_the_same() -> None:
    world = World(parse("kv-compress:budget=12,window=4,recent=4,short=true"), pages=40)
    world.forward(ragged(20, 20))
    with pytest.raises(PoolExhausted):
        world.go_on(40)


def test_pages_held_are_those_that_the_kept_tokens_need() -> None:
    for window in ("4", "full"):
        cache = filled(
            f"kv-compress:budget=16,window={window},skip=2,recent=4", [160, 160], slice(None)
        )
        tokens = int(cache.memory().tokens.sum())
        assert cache.batch.pool.used == -(-tokens // 4)
        assert tokens == 16 * 2 * SHAPE.layers * SHAPE.kv_heads
