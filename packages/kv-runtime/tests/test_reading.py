"""Caches whose decode steps read some pages, by bounds or codes of their keys."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_attention import Attended, DecodeRows, RowInputs
from kv_paging import PagePool
from kv_policy import Budget, CompositionError, PageReading, compose, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.layout import Layout
from native import need
from readings import Reads, Watched, check_bounds, over_pool, steps
from tiered_policies import SHAPE, ByKey, Exact, Ladder, Turned
from tiered_world import World, one, ragged


@dataclass(frozen=True)
class _Two(Exact):
    """Two formats, and a reading, that no composition has checked."""

    tiers: int = 2

    @property
    def reading(self) -> PageReading:
        return PageReading(Budget(8))


KEEPING = {
    "raw": parse("raw"),
    "window": Exact(1, 5),
    "blocks": Exact(1, block=4),
    "blocks-window": Exact(1, 5, block=4),
    "turned": compose(Turned(), parse("raw")),
    "together": compose(Turned("7", "6", together=2), parse("raw")),
    "bykey": ByKey(budget=Budget(20)),
    "bykey-again": ByKey(budget=Budget(20), every=3),
    "bykey-again-blocks": compose(ByKey(budget=Budget(20), every=3), Exact(1, block=4)),
    "bykey-again-window": compose(ByKey(budget=Budget(20), every=3), Exact(1, 5)),
}


def go(world: World) -> None:
    world.forward(ragged(31, 18))
    world.go_on(9)
    world.forward(ragged(3, 11))
    world.go_on(5)
    chosen = torch.tensor([1, 1, 0])
    world.cache.select(chosen)
    world.sequences = 3
    world.key, world.value = world.key[:, chosen], world.value[:, chosen]
    world.seen = world.seen[chosen]
    world.go_on(6)


@pytest.fixture
def watched() -> Iterator[Watched]:
    seen = Watched()
    with patch("kv_runtime.attention.select_pages", seen):
        yield seen


BY = pytest.mark.parametrize("by", ["bounds", "codes"])
CODED = ("window", "turned", "bykey-again", "bykey-again-blocks")
EACH = pytest.mark.parametrize(
    ("name", "by"), [*((name, "bounds") for name in KEEPING), *((name, "codes") for name in CODED)]
)


@EACH
def test_all_pages_are_the_cache_as_it_is(name, by) -> None:
    torch.manual_seed(7)
    go(World(compose(KEEPING[name], Reads(by=by))))


@EACH
def test_pages_are_selected_by_true_bounds_and_no_other_is_read(name, by, watched) -> None:
    torch.manual_seed(7)
    policy = compose(KEEPING[name], Reads(8, by=by))
    cache = PolicyCache(policy, SHAPE, page_tokens=4, backend="torch")
    outputs = steps(cache, (ragged(31, 18), *[one()] * 9, ragged(3, 11), *[one()] * 6))
    cache.select(torch.tensor([1, 1, 0]))
    outputs += steps(cache, [one(3)] * 5)
    assert all(x.isfinite().all() for x in outputs)
    assert watched.fewer > 20
    cache.batch.tiers.parts[0].update_bounds()
    check_bounds(cache)


@EACH
def test_bounds_in_pages_of_a_pool_give_the_same(name, by, watched) -> None:
    """A cache over a pool that others share, beside one with bounds of its own; bit by bit."""
    policy, found = compose(KEEPING[name], Reads(8, by=by)), []
    for inside in (False, True):
        torch.manual_seed(7)
        cache = PolicyCache(policy, SHAPE, page_tokens=4, backend="torch")
        if inside:
            cache = over_pool(policy)
        outputs = steps(cache, (ragged(31, 18), *[one()] * 9, ragged(3, 11), *[one()] * 6))
        cache.select(torch.tensor([1, 1, 0]))
        found.append(outputs + steps(cache, [one(3)] * 5))
        cache.batch.tiers.parts[0].update_bounds()
        check_bounds(cache)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert cache.batch.tiers.parts[0].bounds.in_pages
    assert watched.fewer > 40
    cache.release()
    assert cache._pool.used == 0


def test_what_continues_a_sequence_has_its_bounds(watched) -> None:
    """They are computed before the first continuation, in pages that both hold."""
    torch.manual_seed(8)
    cache = over_pool(Reads(8))
    steps(cache, [ragged(31, 18)])
    made = [cache.branch(1) for _ in range(2)]
    first = cache.batch.tiers.parts[0]
    for each in made:
        store = each.batch.tiers.parts[0]
        full = (store.length // 4).flatten().tolist()
        assert store.bounds.count.tolist() == full
        assert set(full) == {4}
        shared = store.table[..., :4]
        assert torch.equal(shared[:, 0], first.table[:, 1, :, :4])
        check_bounds(each)
    assert cache._pool.shares


@pytest.mark.parametrize(
    "policy",
    [Reads(8), Reads(8, by="codes"), compose(ByKey(budget=Budget(20)), Reads(8, 1))],
)
def test_native_steps_read_some_pages_in_one_call_of_a_layer(policy, watched) -> None:
    """With bounds in pages; as torch does."""
    need("cpu")
    watched.poison = False
    found, read = [], []
    for backend in ("torch", "cpu"):
        torch.manual_seed(3)
        cache = over_pool(policy, backend=backend)
        rows = cache._decode_rows

        def noted(inputs: RowInputs, rows: DecodeRows | None = rows) -> Attended | None:
            read.append(int(inputs.pages[0].length.max()))
            return rows(inputs)

        cache._decode_rows = noted if rows else None
        found.append(steps(cache, (ragged(31, 18), *[one()] * 9)))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert len(read) == 9 * SHAPE.layers
    whole = policy.reading.whole_layers
    for layer in range(SHAPE.layers):
        assert (max(read[layer :: SHAPE.layers]) <= 8) == (layer >= whole)


@settings(max_examples=15)
@given(st.integers(0, 99), st.sampled_from([4, 8, 20]), st.sampled_from(sorted(KEEPING)))
def test_what_is_read_is_what_the_whole_cache_gives_if_nothing_else_is_stored(
    seed, tokens, name
) -> None:
    """Two caches, one of which reads little, hold the same tokens afterwards."""
    outputs, caches = [], []
    for part in (Reads(tokens), Reads()):
        torch.manual_seed(seed)
        cache = PolicyCache(compose(KEEPING[name], part), SHAPE, page_tokens=4, backend="torch")
        outputs.append(steps(cache, (ragged(30, 30), *[one()] * 8)))
        caches.append(cache)
    assert torch.equal(outputs[0][0], outputs[1][0])  # a prompt reads everything
    mine, other = (cache.batch.tiers.counts() for cache in caches)
    assert torch.equal(mine, other)
    mine, other = (c.batch.tiers.parts[0].read_layer(1, frozenset({"keys"})) for c in caches)
    assert torch.equal(mine.key[mine.held], other.key[other.held])


def test_first_layers_read_everything_if_told_to(watched) -> None:
    torch.manual_seed(1)
    cache = PolicyCache(Reads(4, whole=2), SHAPE, page_tokens=4, backend="torch")
    steps(cache, (ragged(30, 30), *[one()] * 3))
    assert watched.calls == watched.fewer == 3  # the third of three layers


@BY
def test_native_code_reads_the_same(by, watched) -> None:
    need("cpu")
    watched.poison = False
    outputs = []
    for backend in ("torch", "cpu"):
        torch.manual_seed(3)
        cache = PolicyCache(Reads(8, by=by), SHAPE, page_tokens=4, backend=backend)
        outputs.append(steps(cache, (ragged(31, 18), *[one()] * 9)))
    for mine, other in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_tokens_taken_back_leave_true_bounds(watched) -> None:
    torch.manual_seed(4)
    cache = PolicyCache(compose(Reads(8), parse("raw")), SHAPE, page_tokens=4, backend="torch")
    steps(cache, (ragged(31, 18), *[one()] * 9))
    cache.roll_back(6)
    steps(cache, [one()] * 9)
    check_bounds(cache)


def test_a_copy_and_a_restored_state_go_on_alike(watched) -> None:
    torch.manual_seed(5)
    cache = PolicyCache(compose(Reads(8), parse("raw")), SHAPE, page_tokens=4, backend="torch")
    steps(cache, (ragged(31, 18), *[one()] * 4))
    again = PolicyCache(cache.policy, SHAPE, page_tokens=4, backend="torch")
    again.restore(cache.state())
    found = []
    for each in (deepcopy(cache), again, cache):
        torch.manual_seed(6)
        found.append(torch.stack(steps(each, [one()] * 7)))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_bytes_of_bounds_are_in_the_report() -> None:
    cache = PolicyCache(Reads(8), SHAPE, page_tokens=4, backend="torch")
    steps(cache, (ragged(31, 18),))
    assert cache.memory().bound_bytes == 12 * 8  # a count per table row
    steps(cache, [one()])
    memory, store = cache.memory(), cache.batch.tiers.parts[0]
    assert memory.bound_bytes == store.bounds.nbytes > 12 * 7 * 2 * 6 * 2
    parts = memory.pages_held_bytes + memory.table_bytes + memory.window_bytes
    assert memory.total_bytes == parts + memory.bound_bytes
    assert "bounds or codes of keys" in repr(memory)
    shared = over_pool(Reads(8))
    steps(shared, (ragged(31, 18), one()))
    memory, page = shared.memory(), shared.layout.pages[0][0]
    assert memory.bound_bytes == memory.pages_used * 2 * 6 * 2 + 12 * 8
    assert memory.vector_bytes + memory.unfilled_bytes == memory.pages_used * (
        page.nbytes - page.bound_bytes
    )
    own = memory.table_bytes + memory.window_bytes + 12 * 8
    assert memory.total_bytes == memory.pages_held_bytes + own
    coded = over_pool(Reads(8, by="codes"))
    steps(coded, (ragged(31, 18), one()))
    memory = coded.memory()
    assert memory.bound_bytes == memory.pages_used * 4 * (4 + 2) + 12 * 8
    plain = PolicyCache(parse("raw"), SHAPE, page_tokens=4, backend="torch")
    steps(plain, (ragged(31, 18), one()))
    assert plain.memory().bound_bytes == 0


def test_what_cannot_have_bounds_is_refused() -> None:
    layout = Layout.of(Reads(8), SHAPE, None, 4, pooled=True)
    memory = torch.zeros(9, layout.page_bytes + 8, dtype=torch.uint8)
    pool = PagePool.over(memory[:, : layout.page_bytes])
    with pytest.raises(ValueError, match=r"both must be multiples of 16 where pages have bounds"):
        PolicyCache(Reads(8), SHAPE, page_tokens=4, pool=pool)
    ranks = compose(Turned("6253", "154"), parse("raw"), Reads(8))
    with pytest.raises(ValueError, match=r"stores heads with .* different ranks"):
        PolicyCache(ranks, SHAPE, page_tokens=4)
    with pytest.raises(CompositionError, match=r"ladder observes the attention of generated"):
        compose(Ladder(), Exact(2), Reads(8))
    with pytest.raises(ValueError, match=r"ranks the pages of one format, and has 2"):
        PolicyCache(_Two(), SHAPE, page_tokens=4)
    with pytest.raises(ValueError, match=r"ranks the pages of one format, and has 2"):
        Layout.of(_Two(), SHAPE, None, 4, pooled=True)
    long = replace(SHAPE, key_dim=576)
    with pytest.raises(ValueError, match=r"have 576 dimensions here; .* use by=bounds, or"):
        PolicyCache(Reads(8, by="codes"), long, page_tokens=4, backend="triton")
    blocks = compose(Exact(1, block=4), Reads(8))
    with pytest.raises(ValueError, match=r"waits for the device .* use backend='torch'"):
        PolicyCache(blocks, SHAPE, page_tokens=4, backend="triton")


def test_a_model_that_selects_tokens_itself_is_refused() -> None:
    cache = PolicyCache(Reads(8), SHAPE, page_tokens=4, backend="torch")
    cache.begin(one())
    x = torch.randn(2, 2, 1, 6)
    chosen = torch.ones(2, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"this model selects the tokens itself"):
        cache.attend(0, x[:, :, None], x, x[..., :5], 0.4, chosen=chosen)
