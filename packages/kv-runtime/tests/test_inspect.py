"""Where tokens are: every policy's cache against all that was ever put into it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_paging import PagePool
from kv_policy import KVPolicy, compose, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.inspect import NOWHERE, Holding, holding, tier_names
from tiered_policies import POLICIES, SHAPE, Exact, Turned
from tiered_world import World, filled, ragged

RAGGED = Turned("6253", "154")  # each head of each layer has ranks of its own
TOGETHER = Turned("75", "46", together=2)
CASES: dict[str, KVPolicy] = POLICIES | {
    "raw": parse("raw"),
    "window": compose(Exact(1, 5)),
    "blocks": compose(Exact(1, block=4)),
    "window-blocks": compose(Exact(1, 5, block=4)),
    "basis": compose(Exact(1), RAGGED),
    "basis-window-blocks": compose(Exact(1, 5, block=4), RAGGED),
    "basis-leankv": compose(POLICIES["leankv"], RAGGED),
    "basis-together": compose(POLICIES["snapkv-window"], TOGETHER),
}


def where(found: Holding, name: str) -> list[list[list[list[int]]]]:
    """The positions in a place, of each layer, sequence and head."""
    (place,) = (i for i, each in enumerate(found.places) if each.name == name)
    return [
        [[head.nonzero()[:, 0].tolist() for head in heads] for heads in layer]
        for layer in found.place == place
    ]


def everywhere(positions: list[list[int]]) -> list[list[list[list[int]]]]:
    """The same positions of each sequence in all layers and heads."""
    return [[[each] * SHAPE.kv_heads for each in positions]] * SHAPE.layers


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_said_to_be_held_where_it_is(name: str) -> None:
    world = World(CASES[name])
    for valid in (ragged(31, 18), *[torch.ones(2, 1, dtype=torch.bool)] * 5, ragged(3, 11)):
        world.forward(valid)
        found = holding(world.cache)
        length = int(world.seen.max())
        assert found.place.shape[3] == length
        times = SHAPE.kv_heads // found.place.shape[2]
        for layer in range(SHAPE.layers):
            kept = world.kept(layer)[..., :length]
            assert torch.equal(found.held[layer].repeat_interleave(times, 1), kept)
        report = world.cache.memory()
        assert torch.equal(found.counts().sum(0), report.tokens)
        tiers = world.cache.batch.tiers.counts()
        each = found.counts()
        for tier, stored in enumerate(tiers):
            mine = [i for i, at in enumerate(world.cache.batch.tiers.tier) if at == tier]
            assert torch.equal(each[mine].sum(0), stored)
        in_pages = sum(place.nbytes for place in found.places if place.kind != "window")
        assert in_pages == report.vector_bytes + report.score_bytes + report.position_bytes
        window = [place.nbytes for place in found.places if place.kind == "window"]
        assert sum(window) == report.window_bytes


def test_streaming_keeps_sinks_and_recent_tokens() -> None:
    found = holding(filled("streaming:budget=12,sinks=2", [31, 9], slice(None), steps=3))
    assert [place.name for place in found.places] == ["raw"]
    assert where(found, "raw") == everywhere([[0, 1, *range(24, 34)], [*range(12)]])
    assert (found.place[:, 1, :, 12:] == NOWHERE).all()  # the other sequence is longer


def test_the_newest_tokens_are_in_the_raw_window() -> None:
    world = World(POLICIES["streaming-window"], sequences=1)
    world.forward(ragged(31))
    found = holding(world.cache)
    assert [(place.name, place.kind) for place in found.places] == [
        *[("exact", "tier"), ("raw window", "window")]
    ]
    assert where(found, "raw window") == everywhere([[*range(26, 31)]])
    assert where(found, "exact") == everywhere([[0, 1, *range(16, 26)]])


def test_a_window_in_pages_is_looked_up_too() -> None:
    policy = POLICIES["streaming-window"]
    pool = PagePool(PolicyCache(policy, SHAPE, page_tokens=4).layout.page_bytes)
    world = World(policy, sequences=1, pool=pool)
    world.forward(ragged(31))
    found, report = holding(world.cache), world.cache.memory()
    assert where(found, "raw window") == everywhere([[*range(26, 31)]])
    assert torch.equal(found.counts().sum(0), report.tokens)
    assert report.window_bytes < found.places[1].nbytes < report.total_bytes


def test_where_every_token_stays_order_says_positions() -> None:
    """23 of 28 tokens have left the window: five blocks of four, and three that wait for one."""
    world = World(CASES["basis-window-blocks"], sequences=1)
    world.forward(ragged(28))
    found = holding(world.cache)
    assert [(place.name, place.kind) for place in found.places] == [
        *[("exact", "tier"), ("exact, waiting raw", "waiting"), ("raw window", "window")]
    ]
    assert where(found, "exact") == everywhere([[*range(20)]])
    assert where(found, "exact, waiting raw") == everywhere([[20, 21, 22]])
    assert where(found, "raw window") == everywhere([[*range(23, 28)]])


def test_leankv_has_two_precisions_and_prunes() -> None:
    cache = filled("leankv:high=k8v4,low=k4v2,t_high=0.5,t_low=0.2,window=4", [40], slice(None))
    found, report = holding(cache), cache.memory()
    assert [place.name for place in found.places] == ["k8v4", "k4v2", "raw window"]
    counts = found.counts()
    assert (counts.amin((1, 2, 3))[:2] > 0).all()
    assert (counts[2] == 4).all()
    assert int((~found.held).sum()) > 0
    key, value = SHAPE.key_dim, SHAPE.value_dim
    high = key + 4 + (value + 1) // 2 + 4 + 8  # codes, scale and zero; a score and a position
    low = (key + 1) // 2 + 4 + (value + 3) // 4 + 4 + 8
    assert found.places[0].nbytes == high * int(counts[0].sum())
    assert found.places[1].nbytes == low * int(counts[1].sum())
    assert torch.equal(counts.sum(0), report.tokens)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 40),
    steps=st.integers(0, 6),
    sinks=st.integers(0, 3),
    recent=st.integers(1, 20),
)
def test_streaming_keeps_as_many_as_it_says(
    length: int, steps: int, sinks: int, recent: int
) -> None:
    policy = f"streaming:budget={sinks + recent},sinks={sinks}"
    found = holding(filled(policy, [length], slice(None), steps=steps))
    seen = length + steps
    kept = [i for i in range(seen) if i < sinks or i >= seen - recent]
    assert found.place.shape == (SHAPE.layers, 1, SHAPE.kv_heads, seen)
    assert where(found, "raw") == everywhere([kept])


def test_sequences_are_looked_up_by_where_they_are() -> None:
    cache = filled("streaming:budget=12,sinks=2", [31, 9], slice(None))
    cache.select(torch.tensor([1, 0, 1]))
    found = holding(cache)
    short, long = [*range(9)], [0, 1, *range(21, 31)]
    assert where(found, "raw") == everywhere([short, long, short])


def test_an_empty_cache_has_nothing_to_look_at() -> None:
    cache = PolicyCache(parse("k8v4"), SHAPE)
    with pytest.raises(ValueError, match="the cache is empty; prefill a prompt"):
        holding(cache)
    cache = filled("k8v4", [5], slice(None))
    cache.release()
    with pytest.raises(ValueError, match="the cache is empty"):
        holding(cache)


def test_tiers_are_called_by_their_formats() -> None:
    def names(text: str) -> tuple[str, ...]:
        return tier_names(parse(text))

    assert names("snapkv") == ("raw",)
    assert names("k4v2:window=16") == ("k4v2",)
    assert names("leankv:high=k8v4:group=16") == ("k8v4:group=16", "k4v2")
    assert names("leankv:high=k4v4,low=k4v4") == ("k4v4 (tier 1)", "k4v4 (tier 2)")
    assert tier_names(Exact(2)) == ("exact (tier 1)", "exact (tier 2)")
