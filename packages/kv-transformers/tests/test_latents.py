"""Models with multi-head latent attention: latents are stored once, and attended to as they are."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AXK1Config,
    BailingHybridConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    KimiLinearConfig,
    LongcatFlashConfig,
    MiniCPM3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
    YoutuConfig,
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
from kv_transformers import CompressedCache, Fold, UnsupportedModelError, cache_shape
from kv_transformers.cache_argument import passing
from kv_transformers.collecting import CollectingCache, output_projections
from kv_transformers.layers import cache_bytes, stored_layers
from kv_transformers.rotary import find_ropes
from latent_models import EXPERTS, HEADS, RANK, ROTATED, SIZES, drawn
from letters import Letters

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
LAYERS = ["linear_attention", "full_attention"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "DeepSeek V2": lambda: DeepseekV2Config(**SIZES | EXPERTS),
    "DeepSeek V3": lambda: DeepseekV3Config(**SIZES | EXPERTS),
    "queries without a latent": lambda: DeepseekV3Config(**SIZES | EXPERTS | {"q_lora_rank": None}),
    "YaRN": lambda: DeepseekV3Config(**SIZES | EXPERTS, rope_parameters=YARN),
    "GLM 4 lite": lambda: Glm4MoeLiteConfig(**SIZES | EXPERTS),
    "MiniCPM 3": lambda: MiniCPM3Config(**SIZES),
    "Youtu": lambda: YoutuConfig(**SIZES),
    "two in a layer": lambda: LongcatFlashConfig(
        **SIZES | {"head_dim": ROTATED},
        ffn_hidden_size=48,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        expert_ffn_hidden_size=16,
    ),
    "Mistral 4": lambda: Mistral4Config(**SIZES | EXPERTS),
    "A.X K1": lambda: AXK1Config(**SIZES | EXPERTS),
    "beside linear attention": lambda: KimiLinearConfig(
        **SIZES | EXPERTS,
        layer_types=LAYERS,
        mlp_layer_types=["dense"] * 2,
        linear_head_dim=8,
        linear_num_heads=4,
    ),
    "gated, beside linear attention": lambda: BailingHybridConfig(
        **SIZES | EXPERTS, layer_types=LAYERS, mlp_layer_types=["dense"] * 2, head_dim=8
    ),
}
STORED = {name: (1,) if "beside" in name else (0, 1) for name in CONFIGS}
RECURRENT = tuple(name for name in CONFIGS if "beside" in name)
every = pytest.mark.parametrize("name", CONFIGS)
one = "DeepSeek V3"
KINDS = (one, "two in a layer", "Mistral 4", *RECURRENT)
few = pytest.mark.parametrize("name", KINDS)
kinds = pytest.mark.parametrize(
    "name", [x if x in KINDS else pytest.param(x, marks=pytest.mark.slow) for x in CONFIGS]
)
alone = pytest.mark.parametrize("name", [one, RECURRENT[0]])


def new(name: str) -> PreTrainedModel:
    config = CONFIGS[name]()
    return drawn(config, Mistral4ForCausalLM if isinstance(config, Mistral4Config) else None)


@cache
def made(name: str = one) -> PreTrainedModel:
    return new(name)


@every
@torch.no_grad()
def test_raw_latents_answer_as_the_models_own_cache(name) -> None:
    model = made(name)
    assert stored_layers(model) == STORED[name]
    want = answered(model, own(model))
    expect_same(answered(model, CompressedCache(model, "raw")), want)
    expect_same(answered(model, own(model)), want)  # and the model is as before


@kinds
@torch.no_grad()
def test_a_token_is_stored_once_in_rank_and_rotated_dimensions(name) -> None:
    model, layers = made(name), len(STORED[name])
    cache = CompressedCache(model, "raw")
    answered(model, cache)
    report, tokens = cache.memory(), 2 * 21 - 4 + 2 * 11
    assert report.vector_bytes == layers * tokens * (RANK + ROTATED) * 4
    own_bytes = cache_bytes(cache.own_layers)
    assert report.other_bytes == own_bytes
    assert report.full_bytes == layers * tokens * (RANK + ROTATED) * 4 + own_bytes
    eight = CompressedCache(model, "k8v4")
    answered(model, eight)  # the bits of keys, with a scale and a zero
    assert eight.memory().vector_bytes == layers * tokens * (RANK + ROTATED + 4)


@torch.no_grad()
def test_a_window_of_raw_latents_is_stored_once() -> None:
    cache = CompressedCache(made(), "k8v4:window=6")
    answered(made(), cache)
    report = cache.memory()
    assert report.window_bytes == 2 * 2 * 6 * (RANK + ROTATED) * 4 + 2 * 6 * 8
    assert report.vector_bytes == 2 * (2 * 21 - 4 + 2 * 11 - 12) * (RANK + ROTATED + 4)


@few
@torch.no_grad()
def test_chunks_of_a_prompt_answer_as_the_whole(name) -> None:
    model = made(name)
    want = answered(model, own(model))
    if name in RECURRENT:  # padding reaches their states unless a prompt is read at once
        ids, mask = (x[:1] for x in prompts())
        want = answered(model, own(model), input_ids=ids, attention_mask=mask)
        got = answered(
            model,
            CompressedCache(model, "raw"),
            input_ids=ids,
            attention_mask=mask,
            prefill_chunk_size=6,
        )
        return expect_same(got, want)
    return expect_same(answered(model, CompressedCache(model, "raw"), prefill_chunk_size=6), want)


@few
@torch.no_grad()
def test_a_follow_up_turn_answers_as_the_models_own_cache(name) -> None:
    expect_follow_up(made(name))


@alone
@torch.no_grad()
def test_beams_answer_as_the_models_own_cache(name) -> None:
    expect_beams(made(name))


@alone
@torch.no_grad()
def test_a_copy_and_a_cleared_cache_answer_alone(name) -> None:
    expect_copies(made(name))


@few
@torch.no_grad()
def test_latents_in_eight_bits_are_near(name) -> None:
    model = made(name)
    want, got = (answered(model, c) for c in (own(model), CompressedCache(model, "k8v8")))
    first = torch.stack([x.logits[1] for x in (got, want)])  # after one token of each
    assert (first[0] - first[1]).norm() < 0.05 * first[1].norm()


POLICIES = {
    "snapkv:budget=12,window=4+k8v4": 23,  # the prompt's 12, and 11 answered tokens
    "streaming:budget=10,sinks=2": 10,
    "h2o:budget=9": 9,
    "tova:budget=9": 9,
    "expected-attention:budget=12": 23,
    "knorm:budget=12": 12,
    "kv-compress:budget=12,window=4,recent=4": None,
    "leankv": None,
}


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_selectors_keep_the_counts_that_they_say(policy) -> None:
    cache = CompressedCache(made(), policy)
    got = answered(made(), cache)
    assert not any(x.isnan().any() for x in got.logits)
    tokens, exact = cache.memory().tokens, POLICIES[policy]
    assert tokens.shape == (2, 2, 1)  # one KV head a layer
    assert bool((tokens < 32).any()) or policy == "leankv"
    if exact is not None:
        assert tokens.unique().tolist() == [exact]


@alone
@pytest.mark.parametrize("policy", ["expected-attention:budget=99", "h2o:budget=99+fp32"])
@torch.no_grad()
def test_a_policy_that_loses_nothing_answers_as_none(name, policy) -> None:
    model = made(name)
    want = answered(model, own(model))
    expect_same(answered(model, CompressedCache(model, policy)), want)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@torch.no_grad()
def test_backends_agree(backend) -> None:
    model = made()
    want = answered(model, CompressedCache(model, "snapkv:budget=12,window=4+k8v4"))
    policy = "snapkv:budget=12,window=4+k8v4"
    expect_same(answered(model, CompressedCache(model, policy, backend=backend)), want)


@torch.no_grad()
def test_the_observed_mass_is_that_of_all_heads_over_a_latent(monkeypatch) -> None:
    """A pass over the model's own expanded vectors gives the same attention mass."""
    expect_mass_of_eager(made(), monkeypatch)


@every
def test_the_shape_is_one_head_whose_value_is_in_its_key(name) -> None:
    shape = cache_shape(made(name))
    assert (shape.kv_heads, shape.group, shape.value_in_key) == (1, HEADS, True)
    assert (shape.key_dim, shape.value_dim) == (RANK + ROTATED, RANK)


@pytest.mark.parametrize("name", [each for each in CONFIGS if each != "Mistral 4"])
def test_the_rotation_is_of_the_last_dimensions(name) -> None:
    model = made(name)
    rope = find_ropes(model, cache_shape(model), "a policy").pairs_of(RANK + ROTATED)
    dims = sorted(dim for pair in rope for dim in pair)
    assert dims == ([] if "Kimi" in type(model).__name__ else [*range(RANK, RANK + ROTATED)])


@torch.no_grad()
def test_collectors_see_latents() -> None:
    model, seen = made(), []

    class Collector:
        def see(self, layer, query, key, value, valid) -> None:
            seen.append((layer, query.shape, key.shape, torch.equal(value, key[..., :RANK])))

    ids, mask = prompts()
    want = model(ids, attention_mask=mask).logits
    cache = CollectingCache(model, Collector())
    got = model(ids, attention_mask=mask, **passing(model, cache)).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)
    dim = RANK + ROTATED
    assert seen == [(i, (2, 1, HEADS, 21, dim), (2, 1, 21, dim), True) for i in (0, 1)]


def test_what_latents_do_not_support_is_refused() -> None:
    model = made()
    with pytest.raises(UnsupportedModelError, match="latent"):
        output_projections(model, cache_shape(model))


def biased(module: Any) -> None:
    module.kv_b_proj.bias = nn.Parameter(torch.zeros(module.kv_b_proj.out_features))


def quantized(module: Any) -> None:
    module.kv_b_proj.weight = nn.Parameter(
        module.kv_b_proj.weight.to(torch.float8_e4m3fn), requires_grad=False
    )


def adapted(module: Any) -> None:
    class Adapted(nn.Linear):
        pass

    inner = module.kv_b_proj
    module.kv_b_proj = Adapted(inner.in_features, inner.out_features, bias=False)


def narrow(module: Any) -> None:
    module.kv_b_proj = nn.Linear(RANK, 8, bias=False)


def other_sizes(module: Any) -> None:
    module.v_head_dim = 9


def other_expansion(module: Any) -> None:
    expand = module.expand_kv
    module.expand_kv = lambda *latents: tuple(2 * x for x in expand(*latents))


def without(module: Any) -> None:
    module.expand_kv = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (biased, "kv_b_proj at layers.1.self_attn has a bias"),
        (quantized, "is a Linear of torch.float8_e4m3fn"),
        (adapted, "kv_b_proj at layers.1.self_attn is a Adapted"),
        (narrow, "has weights of shape"),
        (other_sizes, "of sizes .* by its configuration"),
        (other_expansion, "does more than to apply kv_b_proj"),
        (without, "does not expand latents"),
    ],
)
def test_an_expansion_that_is_not_a_plain_linear_layer_is_refused(change, message) -> None:
    model = new(one)
    change(model.model.layers[1].self_attn)
    with pytest.raises(UnsupportedModelError, match=f"DeepseekV3ForCausalLM.*{message}"):
        CompressedCache(model, "raw")


@torch.no_grad()
def test_a_model_that_changes_vectors_after_the_expansion_raises() -> None:
    model = new(one)
    attention = model.model.layers[1].self_attn
    cache, expand = CompressedCache(model, "raw"), attention.expand_kv

    def scaled(*latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = expand(*latents)
        return 1.5 * key, value

    attention.expand_kv = scaled  # after the cache was made
    with pytest.raises(RuntimeError, match="layer 1 attends to other keys or values"):
        model(prompts()[0], **passing(model, cache))
    attention.expand_kv = lambda *latents: tuple(x[..., :-1] for x in expand(*latents))
    cache.reset()
    with pytest.raises(RuntimeError, match="changes vectors between"):
        model(prompts()[0], **passing(model, cache))


@torch.no_grad()
def test_latents_that_another_layer_attends_to_raise() -> None:
    model = new(one)
    cache = CompressedCache(model, "raw")
    attention = model.model.layers[0].self_attn
    expand = attention.expand_kv

    def elsewhere(*latents: torch.Tensor) -> Any:
        attention.layer_idx = 1
        return expand(*latents)

    attention.expand_kv = elsewhere
    with pytest.raises(RuntimeError, match="attends to other keys than those returned"):
        model(prompts()[0], attention_mask=prompts()[1], **passing(model, cache))


@torch.no_grad()
def test_latents_that_nothing_attends_to_raise() -> None:
    model = new(one)
    cache = CompressedCache(model, "raw")
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def without_attention(hidden_states: torch.Tensor, **given: Any) -> Any:
        shape = hidden_states.shape[0], 1, hidden_states.shape[1]
        given["cache"].update(torch.zeros(*shape, RANK), torch.zeros(*shape, ROTATED), 0)
        return hidden_states, None

    attention.forward = without_attention
    with pytest.raises(RuntimeError, match="nothing attended to the fresh keys of layer 0"):
        model(prompts()[0], **passing(model, cache))
    attention.forward = forward


def test_a_basis_is_refused(tmp_path) -> None:
    from kv_policy import parse

    class Based:
        selector = formats = reading = fitted_to = None
        capabilities = parse("raw").capabilities

        class basis:
            @staticmethod
            def bind(layer, shape):
                raise AssertionError("not reached")

        def __str__(self) -> str:
            return "based"

    for make in (CompressedCache, Fold):
        with pytest.raises(ValueError, match="latent attention"):
            make(made(), Based())


@torch.no_grad()
def test_a_second_reading_keeps_its_budget() -> None:
    for budget, kept in ((12, 23), (99, 32)):
        cache = CompressedCache(made(), f"kvzip:budget={budget}", tokenizer=Letters())
        got = answered(made(), cache)
        assert int(cache.memory().tokens.max()) == kept
    expect_same(got, answered(made(), own(made())))


class Counted:
    """Counts the passes that attend to expanded vectors."""

    def __init__(self, cache: CompressedCache, patch: pytest.MonkeyPatch) -> None:
        self.expanded = self.absorbed = 0
        attend = cache.runtime.attend

        def counted(*given: Any, expanded: Any = None, **options: Any) -> Any:
            self.expanded += expanded is not None
            self.absorbed += expanded is None
            return attend(*given, expanded=expanded, **options)

        patch.setattr(cache.runtime, "attend", counted)


@pytest.mark.parametrize(
    ("policy", "expanded"),
    [
        ("k8v4", True),
        ("snapkv:budget=12,window=4", True),
        ("kvzip:budget=12", True),
        ("streaming:budget=12", True),
        ("kv-compress:budget=12,window=4,recent=4", True),
        ("h2o:budget=9", False),
        ("snapkv:budget=20,window=18", False),  # of which a padded prompt has 17
    ],
)
@torch.no_grad()
def test_prompts_attend_to_expanded_vectors_unless_all_queries_are_observed(
    policy, expanded, monkeypatch
) -> None:
    found = []
    for own_way in (True, False):
        cache = CompressedCache(made(), policy, tokenizer=Letters())
        if not own_way:
            cache.__class__ = type("Absorbing", (CompressedCache,), {"expands": False})
        count = Counted(cache, monkeypatch)
        found.append((answered(made(), cache), cache.memory().tokens))
        assert count.expanded == (2 if expanded and own_way else 0)
        assert count.absorbed == 2 * 12 - count.expanded
    expect_same(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@torch.no_grad()
def test_turns_and_later_chunks_attend_to_latents(monkeypatch) -> None:
    cache, (ids, mask) = CompressedCache(made(), "raw"), prompts()
    count = Counted(cache, monkeypatch)
    for start, end in ((0, 9), (9, 15), (15, 21)):
        given = {"attention_mask": mask[:, :end], **passing(made(), cache)}
        made()(ids[:, start:end], **given)
    assert (count.expanded, count.absorbed) == (2, 4)
