"""KV-Compress in transformers: chunked and whole prompts, batches, and composed policies."""

import pytest
import torch

from kv_policy import Budget
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing

PAGE = 4


def kept(cache: CompressedCache) -> list[list[int]]:
    """Return the kept positions of each layer, sequence and head, over all stores."""
    batch = cache.runtime.batch
    found: list[list[int]] = [[] for _ in range(batch.stores[0].length.numel())]
    for store in batch.stores:
        read = store.read(store.table_rows())
        for row, place in zip(found, read.position.masked_fill(~read.held, -1), strict=True):
            row += [p for p in place.tolist() if p >= 0]
    return [sorted(row) for row in found]


@pytest.mark.parametrize(
    "policy", ["kv-compress:budget=32", "kv-compress:budget=32,window=full,layers=even"]
)
@torch.no_grad()
def test_a_prompt_in_parts_keeps_what_the_whole_one_keeps(make, policy, compressed) -> None:
    model = make(dtype=torch.float64)
    ids = torch.randint(3, 101, (1, 60))
    whole = compressed(model, policy, page_tokens=PAGE)
    expected = model(ids, **passing(model, whole)).logits[:, -1]
    parts = compressed(model, policy, page_tokens=PAGE)
    # Nothing is evicted before the last chunk; after it both agree in every head.
    for part in ids.split([20, 12, 28], dim=1):
        found = model(part, **passing(model, parts)).logits[:, -1]
    torch.testing.assert_close(found, expected)
    assert kept(parts) == kept(whole)
    assert sum(map(len, kept(whole))) == 32 * 6


@torch.no_grad()
def test_a_padded_batch_keeps_what_each_prompt_keeps_alone(make, batch, compressed) -> None:
    model, inputs = make(dtype=torch.float64), batch((53, 31, 40))
    policy = "kv-compress:rate=2,floor=12"
    together = compressed(model, policy, page_tokens=PAGE)
    model(**inputs, **passing(model, together))
    rows = torch.arange(18).view(3, 3, 2)  # layer, sequence, head
    streams = kept(together)
    for b, length in enumerate((53, 31, 40)):
        alone = compressed(model, policy, page_tokens=PAGE)
        model(inputs["input_ids"][b : b + 1, 53 - length :], **passing(model, alone))
        assert [streams[i] for i in rows[:, b].flatten()] == kept(alone)


@torch.no_grad()
def test_each_request_may_bring_its_own_budget(make, batch, compressed) -> None:
    model = make()
    budgets = [Budget(16), None, Budget(50, "percent")]
    cache = compressed(model, "kv-compress:budget=24", budgets=budgets, page_tokens=PAGE)
    model(**batch((80, 80, 80)), **passing(model, cache))
    assert cache.memory().tokens.sum((0, 2)).tolist() == [16 * 6, 24 * 6, 40 * 6]
    with pytest.raises(ValueError, match="smaller than the 8"):
        compressed(model, "kv-compress:budget=24", budgets=[Budget(4)])


@torch.no_grad()
def test_eviction_and_a_format_multiply(make, compressed) -> None:
    model = make("qwen3", torch.bfloat16)  # 10 dimensions: 23 bytes per token instead of 40
    ids = torch.randint(3, 101, (1, 96))
    raw = compressed(model, "kv-compress:budget=24")
    both = compressed(model, "kv-compress:budget=24+k8v4")
    for cache in (raw, both):
        model(ids, **passing(model, cache))
    assert kept(raw) == kept(both)  # nothing was quantized when the prompt was scored
    assert raw.memory().vector_bytes == 24 * 6 * 40
    assert both.memory().vector_bytes == 24 * 6 * 23


@torch.no_grad()
def test_eviction_and_leankvs_tiers_multiply(make, compressed) -> None:
    model = make()
    ids = torch.randint(3, 101, (1, 120))
    cache = compressed(model, "kv-compress:budget=24+leankv:window=8,t_high=0.5")
    model(ids, **passing(model, cache))
    counts = cache.runtime.batch.tiers.counts()
    assert int(counts.sum()) <= 24 * 6  # besides the window
    assert int(counts[0].sum()) > 0
    assert int(counts[1].sum()) > 0
    for _ in range(20):
        model(torch.full((1, 1), 5), **passing(model, cache))
    assert int(cache.runtime.batch.tiers.counts().sum()) == int(counts.sum()) + 20 * 6


@torch.no_grad()
def test_generation_is_compressed_again_and_again(make, batch, compressed) -> None:
    model = make()
    cache = compressed(model, "kv-compress:budget=16,every=8", page_tokens=PAGE)
    model.generate(**batch((40, 25)), **passing(model, cache), max_new_tokens=41, do_sample=False)
    # 40 tokens were generated, so the last of five plans has just run
    assert cache.memory().tokens.sum((0, 2)).tolist() == [16 * 6, 16 * 6]


@torch.no_grad()
def test_a_prompt_shorter_than_the_window_or_the_budget_stays(make, compressed) -> None:
    model = make()
    for length in (2, 5, 30):
        cache = compressed(model, "kv-compress:budget=30", page_tokens=PAGE)
        model(torch.randint(3, 101, (1, length)), **passing(model, cache))
        assert (cache.memory().tokens == length).all()


@torch.no_grad()
def test_expected_attention_knows_the_models_rope(make, batch, compressed) -> None:
    model = make()
    cache = compressed(model, "expected-attention:budget=24")
    model(**batch((60, 50)), **passing(model, cache))
    assert (cache.memory().tokens == 24).all()
