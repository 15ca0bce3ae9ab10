"""Models with an indexer that selects the tokens of each query (DeepSeek sparse attention)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AXK2Config,
    DeepseekV32Config,
    Dots3NoteTextConfig,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    GlmMoeDsaConfig,
    HYV4Config,
    PreTrainedModel,
    Qwen4ExpTextConfig,
)

from answers import (
    answered,
    expect_beams,
    expect_copies,
    expect_follow_up,
    expect_mass_of_eager,
    expect_same,
    own,
    prompts,
)
from kv_transformers import CompressedCache, UnsupportedModelError, uninstall
from kv_transformers.cache_argument import passing
from kv_transformers.collecting import CollectingCache
from kv_transformers.layers import layer_caches, stored_layers
from latent_models import EXPERTS, SIZES, drawn
from letters import Letters

KEPT = 6  # tokens that an indexer selects
INDEX = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": KEPT}
SWA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT = SIZES | EXPERTS | INDEX
SHARED = LATENT | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "DeepSeek V3.2": lambda: DeepseekV32Config(**LATENT),
    "A.X K2": lambda: AXK2Config(**LATENT | {"layer_types": ["indexed_attention"] * 2}),
    "a shared index": lambda: GlmMoeDsaConfig(**SHARED),
    "a shared index and sinks": lambda: HYV4Config(**SHARED, learnable_sink_init=0.5),
    "beside sliding windows": lambda: Dots3NoteTextConfig(
        **LATENT | {"head_dim": 14, "num_hidden_layers": 3},
        **{f"swa_{name}": size for name, size in SWA.items()},
        layer_types=["indexed_attention", "sliding_attention", "indexed_attention"],
        sliding_window=7,
    ),
    "blocks of tokens, beside linear attention": lambda: Qwen4ExpTextConfig(
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "max_position_embeddings")},
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "indexed_attention"],
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=KEPT,
        indexer_compress_ratio=2,
        pad_token_id=0,
    ),
    "pools of tokens, beside linear attention": lambda: Glm5NextConfig(
        text_config=LATENT
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "qk_rope_head_dim": 0,
            "index_kpool": 2,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "projection_intermediate_size": 16,
        },
    ),
}
one, shared, windows, blocks, pools = (
    "DeepSeek V3.2",
    "a shared index",
    "beside sliding windows",
    "blocks of tokens, beside linear attention",
    "pools of tokens, beside linear attention",
)
every = pytest.mark.parametrize("name", CONFIGS)
few = pytest.mark.parametrize("name", [one, shared, windows, blocks, pools])


def new(name: str) -> PreTrainedModel:
    kind = Glm5NextForConditionalGeneration if name == pools else None
    return drawn(CONFIGS[name](), kind)


@cache
def made(name: str = one) -> PreTrainedModel:
    return new(name)


@every
@torch.no_grad()
def test_raw_answers_as_the_models_own_cache(name) -> None:
    model = made(name)
    want = answered(model, own(model))
    expect_same(answered(model, CompressedCache(model, "raw")), want)
    expect_same(answered(model, own(model)), want)  # and the model is as before


@every
@torch.no_grad()
def test_attention_to_all_tokens_would_answer_otherwise(name, monkeypatch) -> None:
    """So the comparisons here fail if what an indexer selects is ignored."""
    model = made(name)
    want = answered(model, own(model))
    cache = CompressedCache(model, "raw")
    attend = cache.runtime.attend

    def ignoring(*given: Any, chosen: torch.Tensor, **options: Any) -> Any:
        counts = chosen[0, -1].sum()  # of the second prompt, some are of padding
        assert KEPT - 1 <= int(counts) <= KEPT + 1
        return attend(*given, **options)

    monkeypatch.setattr(cache.runtime, "attend", ignoring)
    got = answered(model, cache)
    assert (torch.stack(got.logits) - torch.stack(want.logits)).abs().max() > 0.1


@few
@torch.no_grad()
def test_chunks_of_a_prompt_answer_as_with_the_models_own_cache(name) -> None:
    model = made(name)
    given: dict[str, Any] = {}
    if name in (blocks, pools):  # padding reaches states unless a prompt is read at once
        ids, mask = (x[:1] for x in prompts())
        given = {"input_ids": ids, "attention_mask": mask}
    given["prefill_chunk_size"] = 5
    want = answered(model, own(model), **given)
    expect_same(answered(model, CompressedCache(model, "raw"), **given), want)


@few
@torch.no_grad()
def test_a_follow_up_turn_answers_as_the_models_own_cache(name) -> None:
    expect_follow_up(made(name))


@few
@torch.no_grad()
def test_beams_answer_as_the_models_own_cache(name) -> None:
    expect_beams(made(name))


@few
@torch.no_grad()
def test_a_copy_and_a_cleared_cache_answer_alone(name) -> None:
    expect_copies(made(name))


@few
@torch.no_grad()
def test_caches_that_share_a_prefill_have_an_indexer_each(name) -> None:
    model, (ids, mask) = made(name), prompts()
    policies = ("raw", "snapkv:budget=12,window=4")
    together = [CompressedCache(model, policy) for policy in policies]
    together[0].share_prefill(together[1:])
    alone = [CompressedCache(model, policy) for policy in policies]
    for each in (together[0], *alone):
        model(ids, attention_mask=mask, **passing(model, each))
    given = {"input_ids": ids[:, :1], "attention_mask": torch.cat((mask, mask[:, -1:]), 1)}
    for one_cache, other in zip(together, alone, strict=True):
        want = model(**given, **passing(model, other)).logits
        torch.testing.assert_close(model(**given, **passing(model, one_cache)).logits, want)


@torch.no_grad()
def test_tokens_taken_back_are_forgotten_by_the_indexer_too() -> None:
    model, (ids, mask) = made(), prompts()
    cache = CompressedCache(model, "raw")
    model(ids, attention_mask=mask, **passing(model, cache))
    cache.crop(-6)
    got = model(ids[:, -6:], attention_mask=mask, **passing(model, cache)).logits
    want = model(ids, attention_mask=mask).logits[:, -6:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@every
@torch.no_grad()
def test_eight_bits_are_near(name) -> None:
    model = made(name)
    want, got = (answered(model, c) for c in (own(model), CompressedCache(model, "k8v8")))
    first = torch.stack([x.logits[1] for x in (got, want)])  # after one token of each
    assert (first[0] - first[1]).norm() < 0.1 * first[1].norm()


POLICIES = {
    "snapkv:budget=12,window=4+k8v4": 23,  # the prompt's 12, and 11 answered tokens
    "streaming:budget=10,sinks=2": 10,
    "h2o:budget=9": 9,
    "tova:budget=9": 9,
    "kv-compress:budget=12,window=4,recent=4": None,
    "leankv": None,
}


@few
@pytest.mark.grid(3)
@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_selectors_keep_the_counts_that_they_say(name, policy) -> None:
    model = made(name)
    cache = CompressedCache(model, policy)
    got = answered(model, cache)
    assert all(x.isfinite().all() for x in got.logits)
    tokens, exact = cache.memory().tokens, POLICIES[policy]
    assert len(tokens) == len(stored_layers(model))
    assert bool((tokens < 32).any()) or policy == "leankv"
    if exact is not None:
        assert tokens.unique().tolist() == [exact]


@few
@pytest.mark.parametrize("policy", ["h2o:budget=99+fp32", "streaming:budget=99"])
@torch.no_grad()
def test_a_policy_that_loses_nothing_answers_as_none(name, policy) -> None:
    model = made(name)
    expect_same(answered(model, CompressedCache(model, policy)), answered(model, own(model)))


@torch.no_grad()
def test_backends_agree() -> None:
    model, policy = made(), "snapkv:budget=12,window=4+k8v4"
    want = answered(model, CompressedCache(model, policy))
    expect_same(answered(model, CompressedCache(model, policy, backend="reference")), want)


@every
@torch.no_grad()
def test_the_keys_of_an_indexer_stay_with_transformers(name) -> None:
    model = made(name)
    cache, own_cache = CompressedCache(model, "raw"), own(model)
    for each in (cache, own_cache):
        answered(model, each)
    layers = zip(cache.layers, own_cache.layers, cache._kinds, strict=True)
    found = 0
    for mine, theirs, kind in layers:
        if kind.is_indexed and theirs.indexer_keys is not None:
            torch.testing.assert_close(mine.indexer.indexer_keys, theirs.indexer_keys)
            found += mine.indexer.indexer_keys.nbytes
            assert mine.indexer.keys is None
    assert 0 < found <= cache.memory().other_bytes
    if name in (one, shared):  # no other layer keeps anything
        assert cache.memory().other_bytes == found
    assert cache.memory().full_bytes > cache.memory().other_bytes


@torch.no_grad()
def test_the_observed_mass_is_that_of_the_selected_tokens(monkeypatch) -> None:
    expect_mass_of_eager(made(), monkeypatch)


@every
@torch.no_grad()
def test_a_calibration_sees_what_the_model_computes(name) -> None:
    model = made(name)

    class Collector:
        def see(self, layer, query, key, value, valid) -> None:
            pass

    ids, mask = prompts()
    want = model(ids, attention_mask=mask).logits
    cache = CollectingCache(model, Collector())
    got = model(ids, attention_mask=mask, **passing(model, cache)).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_layer_that_does_not_say_what_it_selects_raises() -> None:
    model = new(one)
    attention: Any = model.model.layers[1].self_attn
    forward = attention.indexer.forward
    attention.indexer.forward = lambda *given, **options: forward(*given, **options)[0]
    with pytest.raises(RuntimeError, match="neither their indices nor a mask over all 21 columns"):
        model(prompts()[0], **passing(model, CompressedCache(model, "raw")))


@torch.no_grad()
def test_indices_in_a_layer_of_full_attention_raise(monkeypatch) -> None:
    model = made()
    cache = CompressedCache(model, "raw")
    monkeypatch.setattr(cache, "_selecting", frozenset({0}))
    with pytest.raises(ValueError, match=r"attention to selected tokens \(indices\)"):
        model(prompts()[0], **passing(model, cache))


def test_a_policy_that_reads_prompts_again_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"indexed_attention .* continue from a state"):
        CompressedCache(made(), "kvzip:budget=12", tokenizer=Letters())


def test_shared_latents_and_layers_that_are_not_said_to_be_indexed_are_refused() -> None:
    config = DeepseekV32Config(**LATENT)
    config.kv_sharing_modes = ["store", "reuse_but_indexer"]
    assert layer_caches(config)[1].is_reader
    with pytest.raises(UnsupportedModelError, match="layers that share latents"):
        CompressedCache(AutoModelForCausalLM.from_config(config), "raw")
    config = DeepseekV32Config(**LATENT, layer_types=["full_attention"] * 2)
    with pytest.raises(UnsupportedModelError, match="does not say that the layer is of type"):
        CompressedCache(AutoModelForCausalLM.from_config(config), "raw")


def test_latents_without_the_indices_of_selected_tokens_are_refused(monkeypatch) -> None:
    model = new(one)

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", forward)
    for layer in model.model.layers:
        layer.self_attn.indexer = None
    with pytest.raises(UnsupportedModelError, match="neither is indices of these tokens"):
        CompressedCache(model, "raw")


@torch.no_grad()
def test_a_mask_that_hides_stored_columns_is_refused_where_no_other_mask_is_made() -> None:
    model, (ids, mask) = made(pools), prompts()
    cache = CompressedCache(model, "raw")
    model(ids, mask, **passing(model, cache))  # by position
    assert cache.runtime.held_columns.tolist() == mask.bool().tolist()
    one_more = {"input_ids": ids[:, :1], **passing(model, cache)}
    with pytest.raises(ValueError, match="attention_mask has 9 columns instead of 22"):
        model(attention_mask=mask[:, :9], **one_more)
    cache.reset()
    model(ids, mask, **passing(model, cache))
    with pytest.raises(ValueError, match="hides columns"):
        model(attention_mask=torch.ones(2, 22).long(), **one_more)


@torch.no_grad()
def test_hooks_on_indexers_are_removed_with_the_others() -> None:
    model = new(pools)
    indexer = model.model.language_model.layers[1].self_attn.indexer
    CompressedCache(model, "raw")
    CompressedCache(model, "raw")
    assert len(indexer._forward_hooks) == 1
    uninstall(model)
    assert not indexer._forward_hooks
