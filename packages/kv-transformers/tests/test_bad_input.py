"""Invalid input of a cache, and the error messages."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    MistralConfig,
)

from kv_paging import PoolExhausted
from kv_policy import Budget, UnknownPolicyError
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.support import UnsupportedModelError, expect_order

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_an_unknown_policy_lists_the_installed_ones(make) -> None:
    with pytest.raises(UnknownPolicyError, match=r"'nope'.*k8v4.*snapkv.*streaming"):
        CompressedCache(make(), "nope")
    with pytest.raises(UnknownPolicyError, match=r"'k9v9'; the nearest of \d+ installed: .*k8v8"):
        CompressedCache(make(), "k9v9")


def test_a_policy_and_then_a_model_is_told_the_order(make) -> None:
    # As in a user's program, where types are not checked at run time.
    with pytest.raises(TypeError, match=r"write CompressedCache\(model, 'k8v4'\)"):
        expect_order("k8v4", make())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapkv:budget=-3", "budget '-3' is not understood"),
        ("snapkv:window=many", "window=many is refused"),
        ("snapkv:budget=16,window=32", "smaller than the 32 it protects"),
        ("snapkv:size=3", "no parameter 'size'.*budget, window"),
        ("k8v4+k4v2", "k8v4 and k4v2 both define"),
        ("", "a policy's name is missing"),
    ],
)
def test_a_bad_policy_is_refused_with_what_would_be_right(make, spec, message) -> None:
    with pytest.raises(ValueError, match=message):
        CompressedCache(make(), spec)


def test_a_budget_below_the_window_of_one_request(make) -> None:
    with pytest.raises(ValueError, match="budget of 8 tokens is smaller than the 32"):
        CompressedCache(make(), "snapkv:window=32", budgets=[None, Budget(8)])
    with pytest.raises(ValueError, match="keeps every token"):
        CompressedCache(make(), "k8v4", budgets=[Budget(64)])


@torch.no_grad()
def test_budgets_for_another_number_of_sequences(make, batch) -> None:
    model = make()
    cache = CompressedCache(model, "streaming:budget=8", budgets=[Budget(9), Budget(10)])
    with pytest.raises(ValueError, match="2 budgets were given for a batch of 3"):
        model(**batch(), **passing(model, cache))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MistralConfig(**TINY, sliding_window=16),
            "MistralForCausalLM has only layers of type sliding",
        ),
    ],
    ids=["sliding"],
)
def test_a_model_of_another_kind_is_refused(config, message) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=message):
        CompressedCache(model, "k8v4")


def test_an_empty_prompt(make) -> None:
    cache = CompressedCache(make(), "k8v4")
    for shape in [(1, 0), (0, 4)]:
        with pytest.raises(ValueError, match="prompt is empty"):
            cache.runtime.begin(torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("policy", ["k8v4", "streaming:budget=8"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 3}], ids=["whole", "chunks"])
@torch.no_grad()
def test_a_used_cache_and_another_prompt(make, policy, options) -> None:
    model = make()
    cache = CompressedCache(model, policy)
    model.generate(torch.arange(3, 23)[None], max_new_tokens=6, **passing(model, cache))
    said = {
        1: "the cache holds 25 columns of tokens, but the input has none after them",
        12: "the cache holds 25 columns of tokens, but the input has none after them",
        19: "holds 25 tokens of a sequence, but the input begins at position 6",
        25: "holds 25 tokens of a sequence, but the input begins at position 0",
    }
    for length, message in said.items():
        if options and length > 12:
            continue  # transformers fails at its own positions before the cache is called
        ids = torch.arange(30, 30 + length)[None]
        with pytest.raises(ValueError, match=rf"{message}.*call reset\(\).*whole conversation"):
            model.generate(ids, max_new_tokens=2, **options, **passing(model, cache))
        assert cache.get_seq_length() == 25
    cache.reset()
    ids = torch.arange(30, 36)[None]
    found = model.generate(ids, max_new_tokens=2, do_sample=False, **passing(model, cache))
    assert torch.equal(found, model.generate(ids, max_new_tokens=2, do_sample=False))


@torch.no_grad()
def test_an_input_of_no_token(make) -> None:
    model = make()
    with pytest.raises(ValueError, match="prompt is empty"):
        model(torch.ones(1, 0, dtype=torch.long), **passing(model, CompressedCache(model, "k8v4")))


@torch.no_grad()
def test_a_pool_too_small_for_a_prompt_leaves_the_cache_as_it_was(make) -> None:
    model = make()
    ids = torch.randint(3, 101, (1, 40))
    cache = CompressedCache(model, "k8v4", pages=10)
    with pytest.raises(PoolExhausted, match="10") as caught:
        model(ids, **passing(model, cache))
    assert (caught.value.needed, caught.value.free) == (3 * 2 * 3, 10)
    model(ids[:, :16], **passing(model, cache))
    assert cache.memory().pages_used == 3 * 2


@torch.no_grad()
def test_a_pool_that_runs_dry_half_way_asks_for_a_reset(make) -> None:
    model = make()
    ids = torch.randint(3, 101, (1, 40))
    cache = CompressedCache(model, "streaming:budget=32", pages=10)
    with pytest.raises(PoolExhausted):
        model(ids, **passing(model, cache))
    with pytest.raises(RuntimeError, match="stopped at layer 2 of 3"):
        model(ids, **passing(model, cache))
    cache.reset()
    model(ids[:, :16], **passing(model, cache))
    assert cache.memory().pages_used == 3 * 2


def test_a_model_on_several_devices(make) -> None:
    model = make()
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="spread over cpu, meta"):
        CompressedCache(model, "k8v4")


@torch.no_grad()
def test_another_batch_in_the_same_cache(make, batch) -> None:
    model = make()
    cache = CompressedCache(model, "k8v4")
    model(**batch((5, 5)), **passing(model, cache))
    with pytest.raises(ValueError, match="3 sequences, but the cache holds 2"):
        model(torch.ones(3, 1, dtype=torch.long), **passing(model, cache))


def test_training_is_refused(make) -> None:
    model = make()
    cache = CompressedCache(model, "k8v4")
    with pytest.raises(ValueError, match="inference only"):
        model(torch.ones(1, 4, dtype=torch.long), **passing(model, cache))


@torch.no_grad()
def test_a_mask_of_four_dimensions_is_refused(make) -> None:
    model = make()
    cache = CompressedCache(model, "k8v4")
    with pytest.raises(ValueError, match="2D mask"):
        model(
            torch.ones(1, 4, dtype=torch.long),
            attention_mask=torch.zeros(1, 1, 4, 4),
            **passing(model, cache),
        )


@torch.no_grad()
def test_taking_back_what_cannot_be(make) -> None:
    model = make()
    cache = CompressedCache(model, "streaming:budget=8")
    model(torch.ones(1, 12, dtype=torch.long), **passing(model, cache))
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="cannot take tokens back"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="cannot take tokens back"):
        cache.crop(2)


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33])
@torch.no_grad()
def test_a_prompt_shorter_than_the_window_loses_nothing(make, length) -> None:
    model = make()
    ids = torch.randint(3, 101, (1, length))
    cache = CompressedCache(model, "snapkv:budget=64,window=32")
    got = model(ids, **passing(model, cache)).logits
    more = model(ids[:, :1], **passing(model, cache)).logits
    full = DynamicCache()
    torch.testing.assert_close(got, model(ids, **passing(model, full)).logits, rtol=1e-4, atol=1e-5)
    want = model(ids[:, :1], **passing(model, full)).logits
    torch.testing.assert_close(more, want, rtol=1e-4, atol=1e-5)
    assert (cache.memory().tokens == length + 1).all()
