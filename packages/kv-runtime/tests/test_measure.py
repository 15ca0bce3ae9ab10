"""What is counted of pages, against what caches say of themselves; and how counts join."""

import pytest
import torch

from kv_paging import PagePool
from kv_policy import CacheShape, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.measure import EVERY, Measured, Meter, RequestHeld, held_by
from kv_runtime.stats import Tally
from measured import SOME

SHAPE = CacheShape(layers=2, kv_heads=2, group=1, key_dim=32, value_dim=32)


class Cell:
    """A worker's caches, as far as they are counted."""

    def __init__(self, policy: str) -> None:
        self.policy = parse(policy)
        size = PolicyCache(self.policy, SHAPE).layout.page_bytes
        self.pool = PagePool.over(torch.zeros(401, size, dtype=torch.uint8))
        self.meter = Meter(SHAPE, Tally())

    def cache(self) -> PolicyCache:
        return PolicyCache(self.policy, SHAPE, pool=self.pool, tally=self.meter.tally)

    def count(self, *caches: PolicyCache, read: bool = False) -> Measured | None:
        batches = [cache.batch for cache in caches if cache.batch is not None]
        held = [each for batch in batches for each in held_by(batch, kept=True)]
        return self.meter.step(self.pool, dict(enumerate(held)), read=read)


def feed(
    cache: PolicyCache, tokens: int, *, prompt: bool, more: bool = False, sequences: int = 1
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    cache.begin(torch.ones(sequences, tokens, dtype=torch.bool), prompt=prompt, remaining=int(more))
    for layer in range(SHAPE.layers):
        lead = (sequences, SHAPE.kv_heads)
        query = torch.randn(*lead, 1, tokens, 32, generator=generator).bfloat16()
        key, value = torch.randn(2, *lead, tokens, 32, generator=generator).bfloat16()
        cache.attend(layer, query, key, value, 1.0)


def test_it_counts_what_caches_hold_together() -> None:
    cell = Cell("snapkv:budget=50%+k8v4")
    first, second = cell.cache(), cell.cache()
    feed(first, 64, prompt=True, sequences=2)
    feed(second, 128, prompt=True)
    now = cell.count(first, second)
    assert now is not None
    reports = [first.memory(), second.memory()]
    assert now.pages_used == sum(each.pages_used for each in reports) == cell.pool.used
    assert now.pages_free == cell.pool.free
    assert now.kept == sum(int(each.tokens.sum()) for each in reports)
    assert now.full_bytes == sum(each.full_bytes for each in reports)
    assert now.computed == 2 * 64 + 128
    assert now.gauges()["tokens_kept"] == now.computed / 2
    assert now.gauges()["kv_bytes_per_token"] == now.held_bytes / 256


def test_tokens_of_a_raw_window_are_kept_and_its_pages_held() -> None:
    cell = Cell("k4v4:keys=channel,block=32,window=32")
    cache = cell.cache()
    feed(cache, 100, prompt=True)
    now = cell.count(cache)
    assert now is not None
    assert now.gauges()["tokens_kept"] == now.computed == 100
    assert now.pages_used == cell.pool.used


def test_a_plan_is_one_over_all_layers_and_none_while_a_prompt_goes_on() -> None:
    for policy in ("kv-compress:rate=2+k8v4", "snapkv:budget=16,window=8+k8v4"):
        cell = Cell(policy)
        cache, tally = cell.cache(), cell.meter.tally
        feed(cache, 64, prompt=True, more=True)
        assert (tally.plans, tally.seconds) == (0, 0.0)
        feed(cache, 64, prompt=True)
        assert tally.plans == 1
        seconds = tally.seconds
        assert seconds > 0
        feed(cache, 1, prompt=False)
        assert cache.compress() == []  # these do not plan because pages are short
        assert (tally.plans, tally.seconds) == (1, seconds)


def test_it_counts_after_the_first_step_then_now_and_then_and_when_nothing_is_held() -> None:
    cell = Cell("streaming:budget=32")
    cache = cell.cache()
    assert cell.count() is None
    counted = []
    for step in range(2 * EVERY):
        feed(cache, 40 if step == 0 else 1, prompt=step == 0)
        if cell.count(cache) is not None:
            counted.append(step)
    assert counted == [0, EVERY]
    cache.release()
    last = cell.count()
    assert last is not None
    assert (last.computed, last.kept, last.pages_used, last.pages_free) == (0, 0, 0, 400)
    assert cell.count() is None


def test_plans_are_told_once() -> None:
    cell = Cell("kv-compress:rate=2+k8v4")
    cache = cell.cache()
    feed(cache, 64, prompt=True)
    now = cell.count(cache)
    assert now is not None
    assert now.plans == 1
    cache.release()
    then = cell.count()
    assert then is not None
    assert (then.plans, then.seconds) == (0, 0.0)


def test_a_prompt_that_was_read_in_parts_is_counted_when_it_is_compressed() -> None:
    cell = Cell("kv-compress:rate=4,floor=16,recent=16+k8v4")
    cache = cell.cache()
    feed(cache, 128, prompt=True, more=True)
    first = cell.count(cache)
    assert first is not None
    assert first.kept == 128 * 4
    feed(cache, 128, prompt=True)
    then = cell.count(cache)  # long before the 16th step
    assert then is not None
    assert (then.kept, then.plans) == (64 * 4, 1)
    assert then.dropped == (256 - 64) * 4
    held = cell.pool.used * cell.pool.page_bytes
    assert first.saved + then.saved == 256 * SHAPE.token_bytes - held
    assert first.gauges()["compression_ratio"] == 2
    assert then.gauges()["compression_ratio"] == 8
    for _ in range(3):
        feed(cache, 1, prompt=False)
        assert cell.count(cache) is None
    feed(cache, 1, prompt=False)
    again = cell.count(cache, read=True)  # the prompt of another request, say
    assert again is not None
    assert again.dropped == 0


def test_sums_add_up_what_each_request_saved_at_its_most() -> None:
    meter = Meter(SHAPE, Tally())
    pool = PagePool.over(torch.zeros(11, 100, dtype=torch.uint8))
    full = SHAPE.token_bytes
    counted = []
    for held in (
        {1: RequestHeld(2, 10, 40)},  # nothing is dropped
        {1: RequestHeld(1, 11, 24), 2: RequestHeld(1, 4, 16)},  # 20 of 44 are
        {1: RequestHeld(9, 12, 26), 2: RequestHeld(1, 5, 20)},  # pages were opened
        {3: RequestHeld(1, 7, 20)},  # both are gone, and one began anew
        {},
    ):
        counted.append(meter.step(pool, held, read=bool(held)))
    assert all(each is not None for each in counted)
    assert [each.dropped for each in counted] == [0, 20, 2, 8, 0]
    saved = [
        *(10 * full - 200, 11 * full - 100 - (10 * full - 200) + 4 * full - 100),
        *(max(0, 12 * full - 900 - (11 * full - 100)) + full, 7 * full - 100, 0),
    ]
    assert [each.saved for each in counted] == saved
    total = counted[0]
    for each in counted[1:]:
        total = total.then(each)
    assert total.counters()["tokens_dropped"] == 30 / 4
    assert total.counters()["bytes_saved"] == sum(saved)


def test_workers_add_up_what_they_hold_and_share_what_they_do() -> None:
    other = Measured(
        pages_used=1,
        pages_free=9,
        held_bytes=100,
        full_bytes=1200,
        kept=20,
        table_rows=4,
        computed=20,
        plans=1,
        seconds=0.75,
        dropped=16,
        saved=100,
    )
    both = SOME.beside(other)
    assert both == other.beside(SOME)
    assert both.gauges() == {
        "tokens_computed": 20,
        "tokens_kept": 7.5,
        "pages_used": 4,
        "pages_free": 16,
        "prefix_bytes": 60,
        "kv_bytes_per_token": 20,
        "compression_ratio": 6,
    }
    assert both.counters() == {
        "compression_passes": 1,
        "compression_seconds": 0.75,
        "tokens_dropped": 5,
        "bytes_saved": 1000,
        "prefix_hits": 3,
        "prefix_tokens": 90,
    }


def test_a_later_count_replaces_an_earlier_one_and_plans_add_up() -> None:
    later = Measured(0, 10, 0, 0, 0, 4, 0, 2, 0.25, 4, 50)
    joined = SOME.then(later)
    assert joined.counters() == {
        "compression_passes": 3,
        "compression_seconds": 0.75,
        "tokens_dropped": 7,
        "bytes_saved": 950,
        "prefix_hits": 3,
        "prefix_tokens": 90,
    }
    ratios = {name: SOME.gauges()[name] for name in ("kv_bytes_per_token", "compression_ratio")}
    assert joined.gauges() == later.gauges() | ratios  # of when memory was last held
    assert later.then(SOME).gauges() == SOME.gauges()
    assert joined.then(later).gauges() == joined.gauges()
    assert {**ratios, "kv_bytes_per_token": pytest.approx(2 * ratios["kv_bytes_per_token"])} == {
        name: joined.beside(joined).gauges()[name] for name in ratios
    }


def test_there_is_no_ratio_of_nothing() -> None:
    nothing = Measured(0, 10, 0, 0, 0, 4, 0, 0, 0.0)
    assert nothing.gauges() == {
        "tokens_computed": 0,
        "tokens_kept": 0,
        "pages_used": 0,
        "pages_free": 10,
        "prefix_bytes": 0,
    }


@pytest.mark.parametrize("policy", ["k8v4:window=8", "streaming:budget=32"])
def test_policies_without_plans_count_none_or_one(policy: str) -> None:
    cell = Cell(policy)
    cache = cell.cache()
    feed(cache, 64, prompt=True)
    for _ in range(3):
        feed(cache, 1, prompt=False)
    assert cell.meter.tally.plans == (cell.policy.selector is not None)
