"""Budgets that are planned after each chunk of a prompt, and the pages that a prompt takes."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool, PoolExhausted
from kv_policy import Budget, Evictor, KVPolicy, LayerView, compose, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.layout import Layout
from tiered_policies import SHAPE, Exact
from tiered_world import World, one, ragged

CHUNKS, CHUNK, BUDGET = 39, 9, 9  # 351 tokens
ROWS = SHAPE.layers * SHAPE.kv_heads * 2  # heads of all layers and both sequences
PAGES = ROWS * 3  # nine tokens take three pages of four


@dataclass(frozen=True)
class Worthy(Evictor):
    """Keep the tokens of the largest worth, in each head, after each chunk."""

    name: ClassVar[str] = "worthy"
    reads = frozenset({"keys"})
    scores_once = True
    plans_chunks = True

    def score(self, view: LayerView) -> Tensor:
        """Return a token's worth."""
        assert view.keys is not None
        return view.keys[..., 0]


@dataclass(frozen=True)
class WorthyTogether(Worthy):
    """The same, with all layers planned at once."""

    name: ClassVar[str] = "worthy-together"
    scope = "model"


def poisoned(policy: KVPolicy, pages: int) -> PagePool:
    """Return a pool of so many pages, whose free ones are NaN."""
    layout = Layout.of(policy, SHAPE, None, 4)
    data = torch.zeros(pages + 1, layout.page_bytes, dtype=torch.uint8)
    return PagePool.over(data, poison=True)


def expect_best(world: World, counts: list[int], window: int = 0) -> None:
    """Check that every head holds its best tokens of all seen before the window, and the window."""
    for layer in range(SHAPE.layers):
        held = world.kept(layer)
        for b, seen in enumerate(world.seen.tolist()):
            old = max(0, seen - window)
            best = world.key[layer, b, :, :old, 0].topk(min(counts[b], old), dim=-1).indices
            right = torch.zeros_like(held[b, :, :old]).scatter(1, best, True)
            assert torch.equal(held[b, :, :old], right)
            assert held[b, :, old:seen].all()


@pytest.mark.parametrize("kind", [Worthy, WorthyTogether])
def test_a_prompt_of_any_length_takes_the_pages_of_its_budget(kind: type[Worthy]) -> None:
    policy = kind(Budget(BUDGET))
    world = World(policy, pool=poisoned(policy, PAGES))
    assert world.cache._pool is not None
    for i in range(CHUNKS):
        world.forward(ragged(CHUNK, CHUNK), more=i < CHUNKS - 1)
        expect_best(world, [BUDGET, BUDGET])
        assert world.cache._pool.used == PAGES
    small = World(policy, pool=poisoned(policy, PAGES - 1))
    with pytest.raises(PoolExhausted):
        small.forward(ragged(CHUNK, CHUNK), more=True)


def test_a_prompt_that_is_planned_once_takes_the_pages_of_all_its_tokens() -> None:
    policy = parse("streaming:budget=9")
    world = World(policy, pool=poisoned(policy, PAGES))
    world.forward(ragged(CHUNK, CHUNK), more=True)
    with pytest.raises(PoolExhausted):
        world.forward(ragged(CHUNK, CHUNK), more=True)


@pytest.mark.parametrize("kind", [Worthy, WorthyTogether])
def test_a_window_is_added_to_the_budget(kind: type[Worthy]) -> None:
    policy, window = compose(kind(Budget(BUDGET)), Exact(1, 5)), 5
    layout = Layout.of(policy, SHAPE, None, 4)
    pages = PAGES + ROWS * layout.window_pages(0)
    world = World(policy, pool=poisoned(policy, pages))
    assert world.cache._pool is not None
    for i in range(CHUNKS):
        world.forward(ragged(CHUNK, CHUNK), more=i < CHUNKS - 1)
        expect_best(world, [BUDGET, BUDGET], window)
        assert world.cache._pool.used <= pages
    assert world.cache._pool.used == pages


@pytest.mark.parametrize("chunks", [(CHUNK,) * CHUNKS, (40, 8, 100, 4, 60, 28, 10)], ids=len)
def test_sequences_of_a_batch_have_their_own_budgets(chunks: tuple[int, ...]) -> None:
    world = World(WorthyTogether(Budget(BUDGET)), budgets=[Budget(5), Budget(30)])
    for i, width in enumerate(chunks):
        world.forward(ragged(width, width // 2), more=i < len(chunks) - 1)
        expect_best(world, [5, 30])
    for _ in range(3):
        world.forward(one())


def test_streaming_holds_its_budget_while_it_reads_and_while_it_generates() -> None:
    policy = parse("streaming:budget=9,sinks=2,chunks=true")
    world = World(policy, pool=poisoned(policy, PAGES))
    for i in range(CHUNKS + 30):
        reads = i < CHUNKS
        world.forward(ragged(CHUNK, CHUNK) if reads else one(), more=i < CHUNKS - 1)
        seen = int(world.seen[0])
        right = (torch.arange(400) < 2) | (torch.arange(400) >= seen - 7)
        right &= torch.arange(400) < seen
        for layer in range(SHAPE.layers):
            assert torch.equal(world.kept(layer), right.expand(2, 2, -1))


def test_a_share_of_a_prompt_in_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plans after each chunk .* cannot keep 25% of it"):
        PolicyCache(WorthyTogether(Budget(9)), SHAPE, budgets=[Budget(25, "percent")])
    with pytest.raises(ValueError, match="so it cannot keep 50% of it"):
        Worthy(Budget(50, "percent"))
