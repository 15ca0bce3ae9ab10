"""A cache of a model whose queries attend to columns that it chooses, as DeepSeek's indexer."""

from dataclasses import replace

import pytest
import torch

from kv_paging import PagePool
from kv_policy import CacheShape, compose, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.expanded import Expanded
from kv_runtime.layout import Layout
from native import need
from tiered_policies import POLICIES, SHAPE, Exact, Turned
from tiered_world import World, one, ragged

LATENT: CacheShape = replace(SHAPE, value_in_key=True)
KEEPING = {
    "raw": parse("raw"),
    "window": Exact(1, 5),
    "blocks": Exact(1, block=4),
    "blocks-window": Exact(1, 5, block=4),
    "turned": compose(Turned(), parse("raw")),
    "together": compose(Turned("7", "6", together=2), parse("raw")),
    "ranks": compose(Turned("6253", "154"), parse("raw")),
}


def go(world: World) -> None:
    world.forward(ragged(31, 18))
    world.go_on(3)
    world.forward(ragged(3, 11))
    world.go_on(1)
    chosen = torch.tensor([1, 1, 0])
    world.cache.select(chosen)
    world.sequences = 3
    world.key, world.value = world.key[:, chosen], world.value[:, chosen]
    world.seen, world.columns = world.seen[chosen], world.columns[chosen]
    world.go_on(2)


@pytest.mark.parametrize("name", KEEPING)
def test_queries_attend_to_the_tokens_of_the_columns_they_choose(name) -> None:
    torch.manual_seed(7)
    go(World(KEEPING[name], share=0.1))


def test_a_backend_without_code_for_it_leaves_it_to_torch() -> None:
    need("cpu")
    torch.manual_seed(7)
    go(World(parse("raw"), share=0.3, backend="cpu"))


@pytest.mark.parametrize("name", POLICIES)
def test_chosen_tokens_that_a_policy_dropped_are_not_attended_to(name) -> None:
    torch.manual_seed(7)
    world = World(POLICIES[name], share=0.1)
    go(world)
    if name in ("streaming", "snapkv", "kv-compress", "h2o"):
        assert world.lost > 0  # and some had none left, which attend to all that is held


def test_latents_are_chosen_alike() -> None:
    torch.manual_seed(7)
    world = World(parse("snapkv:budget=14,window=4,pool=3"), shape=LATENT, share=0.2)
    world.forward(ragged(31, 18))
    world.go_on(6)


def test_columns_taken_back_are_chosen_no_more() -> None:
    torch.manual_seed(7)
    world = World(parse("raw"), share=0.3)
    world.forward(ragged(20, 13))
    world.forward(ragged(5, 3))
    world.cache.roll_back(4)
    world.seen, world.columns = torch.tensor([21, 13]), world.columns[:, :-4]
    world.go_on(3)


def test_expanded_vectors_are_chosen_as_latents_are() -> None:
    g = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 2, 2, 9, 6, generator=g), torch.randn(2, 2, 9, 6, generator=g)
    share = torch.rand(2, 9, 9, generator=g) < 0.4
    outs, masses = [], []
    for alone in (False, True):
        cache = PolicyCache(parse("snapkv:budget=4,window=3"), LATENT)
        keep = cache.keep

        def record(layer, key, value, result, *rest, keep=keep) -> None:
            masses.append(result.mass[-1])
            keep(layer, key, value, result, *rest)

        cache.keep = record
        cache.begin(ragged(9, 6))
        assert cache.attends_alone
        every = key.repeat_interleave(2, 1)
        expanded = Expanded(query.flatten(1, 2), every, every[..., :5]) if alone else None
        options = {"expanded": expanded, "chosen": share}
        out = cache.attend(0, query, key, key[..., :5], 0.4, **options)
        outs.append(out.flatten(1, 2))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(masses[0], masses[1], rtol=1e-4, atol=1e-5)


def test_other_columns_and_a_shared_pool_are_refused() -> None:
    query, new = torch.randn(2, 2, 2, 1, 6), torch.randn(2, 2, 1, 6)

    def attend(cache: PolicyCache, columns: int) -> None:
        cache.begin(one())
        chosen = torch.ones(2, 1, columns, dtype=torch.bool)
        cache.attend(0, query, new, new[..., :5], 1.0, chosen=chosen)

    with pytest.raises(ValueError, match="from 3 columns instead of 1: 0 of the batch and 1"):
        attend(PolicyCache(parse("raw"), SHAPE), 3)
    policy = parse("raw")
    pool = PagePool(Layout.of(policy, SHAPE, None, 4).page_bytes, grows=True)
    shared = PolicyCache(policy, SHAPE, page_tokens=4, pool=pool)
    shared.begin(one())
    for layer in range(SHAPE.layers):
        shared.attend(layer, query, new, new[..., :5], 1.0)
    with pytest.raises(ValueError, match="shared pool, which does not record"):
        attend(shared, 2)
