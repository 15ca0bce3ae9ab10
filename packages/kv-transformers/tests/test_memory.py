"""The bytes that a cache reports equal those of its parts and its tensors."""

import pytest
import torch

from kv_policy.key_codes import code_bytes
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.from_text import held as size_of
from kv_transformers.from_text import make_cache

POLICIES = [
    "raw",
    "k8v4",
    "k4v2:window=16",
    "streaming:budget=24",
    "snapkv:budget=24,window=8",
    "snapkv:budget=50%,window=8+k8v4",
    "snapkv:budget=24,window=8+k4v2:window=4",
    "kv-compress:rate=3,floor=16+k8v4",
    "kv-compress:budget=20,every=2+leankv:window=4",
]


def held(cache: CompressedCache) -> int:
    """Count the bytes of all tensors reachable from the cache, each storage once."""
    found, queue, known = {}, [cache.runtime.batch], set()
    while queue:
        thing = queue.pop()
        if id(thing) in known:
            continue
        known.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, (tuple, list)):
            queue.extend(thing)
        elif type(thing).__module__.startswith(("kv_runtime", "kv_transformers", "kv_paging")):
            slots = getattr(type(thing), "__slots__", ())
            queue.extend(getattr(thing, name) for name in slots)
            queue.extend(getattr(thing, "__dict__", {}).values())
    return sum(found.values())


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_the_report_adds_up_and_is_what_tensors_hold(make, batch, policy) -> None:
    model = make()
    cache = CompressedCache(model, policy, page_tokens=8)
    inputs = batch((70, 41))
    model(**inputs, **passing(model, cache))
    mask = inputs["attention_mask"]
    for _ in range(5):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        model(torch.full((2, 1), 9), attention_mask=mask, **passing(model, cache))
        report = cache.memory()
        named = (
            report.vector_bytes,
            report.score_bytes,
            report.position_bytes,
            report.unfilled_bytes,
            report.spare_bytes,
            report.window_bytes,
            report.table_bytes,
            report.basis_bytes,
        )
        assert min(named) >= 0
        assert sum(named) == report.total_bytes
        assert report.pages_held_bytes == cache.runtime.batch.pool.data.numel()
        # Small counters (tokens seen, ends of the free list) are not counted.
        assert 0 <= held(cache) - report.total_bytes <= 64


@torch.no_grad()
def test_integers_take_exactly_their_bytes(make) -> None:
    model = make("qwen3", torch.bfloat16)  # 10 dimensions: 10 + 4 and 5 + 4 bytes, not 40
    cache = CompressedCache(model, "k8v4", page_tokens=16)
    model(torch.randint(3, 101, (1, 64)), **passing(model, cache))
    report = cache.memory()
    heads = 3 * 2 * 64
    assert report.vector_bytes == heads * (14 + 9)
    assert report.full_bytes == heads * 40
    assert report.unfilled_bytes == 0
    assert report.pages_used == 3 * 2 * 4
    assert (report.tokens == 64).all()


@torch.no_grad()
def test_snapkv_holds_its_budget_and_the_pages_for_it(make) -> None:
    model = make()
    cache = CompressedCache(model, "snapkv:budget=48,window=8", pages=60, page_tokens=16)
    model(torch.randint(3, 101, (1, 160)), **passing(model, cache))
    report = cache.memory()
    assert (report.tokens == 48).all()
    assert report.pages_used == 3 * 2 * 3
    assert report.pages_free == 60 - 18


@torch.no_grad()
def test_what_a_follow_up_drops_goes_back_to_the_pool(make) -> None:
    model = make()
    cache = CompressedCache(model, "snapkv:budget=32,window=8", page_tokens=4)
    model(torch.randint(3, 101, (1, 100)), **passing(model, cache))
    for _ in range(3):
        model(torch.randint(3, 101, (1, 40)), **passing(model, cache))
        assert (cache.memory().tokens == 32).all()
        assert cache.memory().pages_used == 3 * 2 * 8


@torch.no_grad()
def test_nothing_is_held_before_the_first_token_nor_after_a_reset(make) -> None:
    model = make()
    cache = CompressedCache(model, "k8v4")
    assert cache.memory().total_bytes == 0
    model(torch.randint(3, 101, (1, 30)), **passing(model, cache))
    assert cache.memory().total_bytes > 0
    cache.reset()
    assert cache.memory().total_bytes == 0
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_cache_and_its_report_say_what_they_hold(make, batch) -> None:
    model = make()
    cache = CompressedCache(model, "streaming:budget=24+k8v4", page_tokens=8)
    assert repr(cache) == "CompressedCache(streaming:budget=24+k8v4: no tokens)"
    assert "uncompressed" in repr(cache.memory())
    model(**batch((70, 41)), **passing(model, cache))
    report = cache.memory()
    held = f"{report.total_bytes:,} bytes, {report.ratio:.1%} of uncompressed"
    said = f"streaming:budget=24+k8v4: 2 x 70 tokens, 24 kept per head, {held}"
    assert repr(cache) == f"CompressedCache({said})"
    rows = {line[:22].strip(): line[22:].split() for line in repr(report).splitlines()[1:]}
    assert list(rows)[-2:] == ["total", "uncompressed"]
    counts = [int(row[0].replace(",", "")) for row in rows.values()]
    assert sum(counts[:-2]) == counts[-2] == report.total_bytes
    assert counts[-1] == report.full_bytes
    assert rows["uncompressed"][1] == "100.00%"
    html = report._repr_html_()
    assert html.count("<tr>") == 1 + len(rows)
    assert f"<td>{report.total_bytes:,}</td>" in html


@pytest.mark.parametrize("by", ["bounds", "codes"])
@pytest.mark.parametrize(("policy", "pages"), [("k8v4", 6), ("k8v4:window=16", 5)])
@torch.no_grad()
def test_bounds_that_the_first_step_computes_are_counted_before_it(make, policy, pages, by) -> None:
    model = make()
    cache = make_cache(model, f"{policy}+quest:budget=50%,by={by}")
    assert size_of(cache).kv_bytes == cache.memory().total_bytes
    model(torch.randint(3, 101, (1, 96)), **passing(model, cache))
    shape, report = cache.runtime.shape, cache.memory()
    before, rows = size_of(cache).kv_bytes, shape.layers * shape.kv_heads
    # Of pages of 16 tokens; bounds have 4 bytes per channel.
    each = code_bytes(shape.key_dim, 16) if by == "codes" else 4 * shape.key_dim
    bounds = rows * pages * each
    assert before - report.total_bytes == bounds - report.bound_bytes > 0
    model(torch.full((1, 1), 9), **passing(model, cache))
    assert cache.memory().bound_bytes >= bounds
    assert size_of(cache).kv_bytes == cache.memory().total_bytes
    plain = make_cache(model, policy)
    model(torch.randint(3, 101, (1, 96)), **passing(model, plain))
    assert size_of(plain).kv_bytes == plain.memory().total_bytes
