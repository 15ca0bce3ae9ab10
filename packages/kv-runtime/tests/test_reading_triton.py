"""Caches whose decode steps read some pages, with Triton's kernels: the host waits for nothing."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_policy import Budget, KVPolicy, compose, parse
from kv_runtime.cache import PolicyCache
from readings import Reads, Watched, check_bounds, steps
from tiered_policies import SHAPE, ByKey, Turned
from tiered_world import one, ragged
from unread import reading_raises

KEEPING: dict[str, KVPolicy] = {
    "k8v4": parse("k8v4"),
    "window": parse("k4v2:window=5"),
    "turned": compose(Turned(), parse("bf16")),
    "evicted": parse("kv-compress:keep=50%+k8v4"),
    "evicted again": compose(ByKey(budget=Budget(20), every=3), parse("k8v4")),
}


@pytest.fixture
def watched() -> Iterator[Watched]:
    seen = Watched()
    with patch("kv_runtime.attention.select_pages", seen):
        yield seen


def poisoned(cache: PolicyCache) -> None:
    """Fill free pages with NaN, those of now and of later."""
    assert cache.batch is not None
    pool = cache.batch.pool
    pool.data[pool.ring.first(pool.free)] = 255
    pool.poison = True


@pytest.mark.parametrize(
    ("name", "by"), [*((name, "bounds") for name in KEEPING), ("evicted again", "codes")]
)
def test_pages_are_selected_by_true_bounds_and_no_other_is_read(name, by, watched) -> None:
    """Rows of unlike lengths; what is not read and what is free is NaN, and attention is not."""
    outputs = []
    for backend in ("triton", "torch"):
        torch.manual_seed(7)
        policy = compose(KEEPING[name], Reads(8, by=by))
        cache = PolicyCache(policy, SHAPE, pages=400, page_tokens=4, backend=backend)
        outputs.append(steps(cache, [ragged(31, 18)]))
        poisoned(cache)
        outputs[-1] += steps(cache, [one()] * 3)
        cache.select(torch.tensor([1, 1, 0]))
        outputs[-1] += steps(cache, [one(3)])
        cache.batch.tiers.parts[0].update_bounds()
        check_bounds(cache)
    assert watched.fewer > 10
    for mine, other in zip(*outputs, strict=True):
        assert mine.isfinite().all()
        assert float((mine.double() - other.double()).norm() / other.double().norm()) < 1e-3


@pytest.mark.parametrize("name", ["k8v4", "evicted again"])
def test_all_pages_have_the_bits_of_a_cache_that_reads_all(name) -> None:
    outputs = []
    for policy in (compose(KEEPING[name], Reads()), KEEPING[name]):
        torch.manual_seed(3)
        cache = PolicyCache(policy, SHAPE, page_tokens=4, backend="triton")
        outputs.append(torch.stack(steps(cache, (ragged(31, 18), *[one()] * 3))[1:]))
    assert torch.equal(*outputs)


def test_rows_that_are_read_whole_beside_others_have_the_same_bits() -> None:
    """The host does not know that the budget suffices for one of the sequences."""
    outputs = []
    for policy in (compose(KEEPING["k8v4"], Reads(12)), KEEPING["k8v4"]):
        torch.manual_seed(3)
        cache = PolicyCache(policy, SHAPE, page_tokens=4, backend="triton")
        outputs.append(torch.stack(steps(cache, (ragged(31, 6), *[one()] * 2))[1:]))
    mine, other = outputs
    assert torch.equal(mine[:, 1], other[:, 1])
    assert not torch.equal(mine[:, 0], other[:, 0])


@pytest.mark.parametrize(
    "text",
    [
        "quest:budget=8,whole=0",
        "quest:budget=8,whole=0,by=codes",
        "kv-compress:keep=50%+k8v4+quest:budget=25%,whole=1",
    ],
)
def test_a_step_reads_nothing_that_the_device_has(text, monkeypatch) -> None:
    """Over several pages of each row, and just after a prompt, whose pages have no bounds yet."""
    torch.manual_seed(1)
    cache = PolicyCache(parse(text), SHAPE, pages=400, page_tokens=4, backend="triton")
    steps(cache, [ragged(31, 18)])
    with reading_raises(monkeypatch):
        found = steps(cache, [one()] * 4)
    assert all(x.isfinite().all() for x in found)
    cache.batch.tiers.parts[0].update_bounds()
    check_bounds(cache)


@settings(max_examples=3)
@given(
    st.integers(0, 99),
    st.sampled_from(sorted(KEEPING)),
    st.sampled_from([4, 8, 20]),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.integers(1, 4),
)
def test_outputs_are_those_of_torch(seed, name, tokens, lengths, count) -> None:
    outputs = []
    for backend in ("triton", "torch"):
        torch.manual_seed(seed)
        policy = compose(KEEPING[name], Reads(tokens, whole=1))
        cache = PolicyCache(policy, SHAPE, page_tokens=4, backend=backend)
        outputs.append(steps(cache, (ragged(*lengths), *[one()] * count)))
    for mine, other in zip(*outputs, strict=True):
        assert float((mine.double() - other.double()).norm() / other.double().norm()) < 1e-3
