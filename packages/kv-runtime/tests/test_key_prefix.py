"""A cache whose values are the first dimensions of its keys, as in latent attention."""

from dataclasses import replace

import pytest
import torch

from kv_paging import PagePool
from kv_policy import CacheShape, compose, parse
from kv_runtime.batch import Batch
from kv_runtime.cache import PolicyCache
from kv_runtime.expanded import Expanded
from kv_runtime.layout import Layout
from kv_runtime.window.dense import RawWindow
from tiered_policies import POLICIES, SHAPE, Exact, Turned
from tiered_world import World, one, ragged

LATENT: CacheShape = replace(SHAPE, value_in_key=True)
NAMES = [name for name, policy in POLICIES.items() if policy.basis is None]


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_over_the_tokens_that_are_kept(name: str) -> None:
    world = World(POLICIES[name], shape=LATENT)
    world.forward(ragged(31, 18))
    world.go_on(9)
    world.forward(ragged(3, 11))
    chosen = torch.tensor([1, 1, 0])
    world.cache.select(chosen)
    world.sequences = 3
    world.key = world.key[:, chosen]
    world.value = world.key[..., :5]
    world.seen = world.seen[chosen]
    world.go_on(5)


@pytest.mark.parametrize("policy", [Exact(1, 5), Exact(1, 0), parse("raw")])
def test_memory_is_that_of_keys(policy) -> None:
    world = World(policy, shape=LATENT)
    world.forward(ragged(20, 9))
    world.go_on(3)
    report, window = world.cache.memory(), 0 if policy.formats is None else policy.formats.window
    heads = SHAPE.layers * SHAPE.kv_heads
    assert report.vector_bytes == (35 - 2 * window) * heads * 6 * 4
    assert report.window_bytes == 2 * window * (heads * 6 * 4 + 8)
    assert report.full_bytes == 35 * heads * 6 * 4


def test_a_window_in_pages_stores_keys_alone() -> None:
    policy = compose(parse("streaming:budget=12,sinks=2"), Exact(1, 5))
    layout = Layout.of(policy, LATENT, None, 4)
    pool = PagePool(layout.page_bytes, grows=True)
    batch = Batch.allocate(
        policy, layout, 2, None, torch.device("cpu"), pool=pool, window_in_pages=True
    )
    assert batch.window is not None
    (store,) = batch.window.stores
    assert store.layout.format.nbytes == 6 * 4
    whole = RawWindow(LATENT, 2, 5, torch.device("cpu"), scores=True)
    generator = torch.Generator().manual_seed(2)
    seen = torch.zeros(2, dtype=torch.long)
    for width in (7, 1, 1):
        key = torch.randn(3, 2, 2, width, 6, generator=generator)
        place = seen[:, None] + torch.arange(width)
        seen = seen + width
        given = (key, key[..., :5], place, seen, torch.rand(3, 2, 2, width, generator=generator))
        if width == 1:
            for mine, theirs in zip(
                whole.exchange(*given), batch.window.exchange(*given), strict=True
            ):
                torch.testing.assert_close(mine, theirs)
        else:
            for each in (whole, batch.window):
                each.put(slice(None), *given)
        for each in (whole, batch.window):
            each.advance(place, seen)
        for layer in range(3):
            for mine, theirs in zip(
                whole.in_order(layer), batch.window.in_order(layer), strict=True
            ):
                torch.testing.assert_close(mine, theirs)
    assert torch.equal(whole.values(1), whole.keys(1)[..., :5])


def test_values_elsewhere_are_refused() -> None:
    cache = PolicyCache(parse("raw"), LATENT)
    cache.begin(one())
    query, key = torch.randn(2, 2, 2, 1, 6), torch.randn(2, 2, 1, 6)
    for value in (key[..., :5].clone(), key[..., 1:], key[..., :4]):
        with pytest.raises(ValueError, match="stores values in keys; pass key"):
            cache.attend(0, query, key, value, 1.0)
    assert cache.attend(0, query, key, key[..., :5], 1.0).shape == (2, 2, 2, 1, 5)


def test_expanded_vectors_are_for_prompts_alone() -> None:
    given = Expanded(*(torch.randn(2, 4, 3, 4) for _ in range(3)))
    cache = PolicyCache(parse("h2o:budget=4"), LATENT)
    cache.begin(torch.ones(2, 3, dtype=torch.bool))
    query, key = torch.randn(2, 2, 2, 3, 6), torch.randn(2, 2, 3, 6)
    assert not cache.attends_alone
    with pytest.raises(ValueError, match="only if attends_alone is true"):
        cache.attend(0, query, key, key[..., :5], 1.0, expanded=given)


def test_a_basis_is_refused() -> None:
    with pytest.raises(ValueError, match="latent attention"):
        PolicyCache(Turned("4", "4"), LATENT)
