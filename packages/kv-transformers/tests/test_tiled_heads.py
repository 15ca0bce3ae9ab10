"""Models whose KV heads are repeated as a whole for their query heads (JetMoe)."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, JetMoeConfig, PreTrainedModel

from answers import answered, expect_same, own, prompts
from kv_transformers import CompressedCache
from kv_transformers.attention import FreshKeys
from kv_transformers.cache_argument import passing
from kv_transformers.collecting import CollectingCache


@cache
def made() -> PreTrainedModel:
    torch.manual_seed(4)
    config = JetMoeConfig(
        vocab_size=101,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=3,
        kv_channels=8,
        intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.mark.parametrize("policy", ["raw", "h2o:budget=99+fp32"])
@torch.no_grad()
def test_the_answer_is_that_of_the_models_own_cache(policy) -> None:
    model = made()
    want = answered(model, own(model))
    cache = CompressedCache(model, policy)
    expect_same(answered(model, cache), want)
    assert (cache.runtime.shape.kv_heads, cache.runtime.shape.group) == (3, 2)
    expect_same(answered(model, own(model)), want)


@torch.no_grad()
def test_a_selector_keeps_the_count_that_it_says() -> None:
    cache = CompressedCache(made(), "snapkv:budget=12,window=4+k8v4")
    got = answered(made(), cache)
    assert all(x.isfinite().all() for x in got.logits)
    assert cache.memory().tokens.unique().tolist() == [23]


@torch.no_grad()
def test_collectors_see_queries_in_the_groups_of_their_heads() -> None:
    model, shapes = made(), []

    class Collector:
        def see(self, layer, query, key, value, valid) -> None:
            shapes.append((query.shape[1:3], key.shape[1], value.shape[1]))

    ids, mask = prompts()
    want = model(ids, attention_mask=mask).logits
    cache = CollectingCache(model, Collector())
    got = model(ids, attention_mask=mask, **passing(model, cache)).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)
    assert shapes == [((3, 2), 3, 3)] * 2


def test_any_other_repetition_loses_the_mark() -> None:
    keys = FreshKeys.mark(torch.randn(2, 3, 4, 5), CompressedCache(made(), "raw"), 0)
    twice = keys.repeat(1, 2, 1, 1)
    assert isinstance(twice, FreshKeys)
    assert (twice.tiles, twice.shape) == (2, keys.shape)
    for other in (keys.repeat(1, 1, 2, 1), keys.repeat(2, 1, 1, 1), twice.repeat(1, 2, 1, 1)):
        assert not isinstance(other, FreshKeys)
