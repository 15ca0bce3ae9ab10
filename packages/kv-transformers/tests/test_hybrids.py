"""Layers of full attention are compressed; the model keeps the caches of its other layers."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    NemotronHConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3NextConfig,
    cache_utils,
)

from answers import answered, expect_near, expect_same, own, prompts
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.collecting import CollectingCache, output_projections
from kv_transformers.fold import Fold
from kv_transformers.layers import cache_bytes, layer_caches, stored_layers
from kv_transformers.support import UnsupportedModelError, cache_shape
from kv_transformers.watching import EmptyCache
from rotated import Wide

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, Callable[[], Any]] = {
    "windows": lambda: Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=WINDOWS),
    "windows first": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
    "heads of two sizes": lambda: Gemma4TextConfig(
        **SIZES,
        sliding_window=8,
        layer_types=WINDOWS,
        global_head_dim=32,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=101,
    ),
    "chunks": lambda: Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"] * 2,
    ),
    "gated, linear": lambda: Qwen3NextConfig(
        **SIZES | EXPERTS | LINEAR, linear_num_key_heads=2, shared_expert_intermediate_size=16
    ),
    "shared keys": lambda: Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 8},
        sliding_window=8,
        layer_types=WINDOWS * 2,
        global_head_dim=32,
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=101,
    ),
    "shared, not cut": lambda: Gemma3nTextConfig(
        **SIZES | {"num_hidden_layers": 8, "intermediate_size": [48] * 8},
        sliding_window=8,
        layer_types=WINDOWS * 2,
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=101,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 8,
    ),
    "sinks": lambda: GptOssConfig(
        **SIZES, sliding_window=8, layer_types=WINDOWS, num_local_experts=4, num_experts_per_tok=2
    ),
    "soft cap": lambda: Gemma2Config(
        **SIZES, sliding_window=8, layer_types=WINDOWS, attn_logit_softcapping=3.0
    ),
    "convolutions": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2),
    "states beside": lambda: FalconH1Config(**SIZES | MAMBA, mamba_n_groups=1, mamba_chunk_size=8),
    "mlp, too": lambda: NemotronHConfig(
        **SIZES,
        layer_types=["linear_attention", "full_attention", "mlp", "full_attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
    ),
}
STORED = {
    "windows": (1, 3),
    "windows first": (0, 1),
    "heads of two sizes": (1, 3),
    "chunks": (1, 3),
    "gated, linear": (3,),
    "shared keys": (1, 3),
    "shared, not cut": (1, 3),
    "sinks": (1, 3),
    "soft cap": (1, 3),
    "convolutions": (1, 3),
    "states beside": (0, 1, 2, 3),
    "mlp, too": (1, 3),
}
RECURRENT = ("gated, linear", "states beside", "mlp, too")
hybrids = pytest.mark.parametrize("name", CONFIGS)
# One of each kind of layer beside those of full attention, and of how layers share.
KINDS = ("windows", "chunks", "gated, linear", "shared keys", "convolutions", "states beside")
kinds = pytest.mark.parametrize(
    "name",
    [x if x in KINDS else pytest.param(x, marks=pytest.mark.slow) for x in CONFIGS],
)


@cache
def made(name: str) -> PreTrainedModel:
    torch.manual_seed(23)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
        for named, parameter in model.named_parameters():
            if named.endswith("sinks"):
                parameter.normal_(std=2)
    return model


@hybrids
def test_the_policy_stores_layers_of_full_attention_alone(name) -> None:
    model = made(name)
    cache = CompressedCache(model, "k8v4")
    assert stored_layers(model) == STORED[name]
    assert cache.runtime.shape.layers == len(STORED[name])
    assert len(cache) == model.config.num_hidden_layers
    kinds = [each.kind for each in layer_caches(model.config)]
    assert len(set(kinds)) > 1 or kinds[0] == "hybrid"


@pytest.mark.parametrize("name", ["shared keys", "shared, not cut"])
def test_layers_that_read_others_score_by_all_queries(name) -> None:
    model, prompt = made(name), torch.arange(3, 63)[None]
    found = []
    for kept in (0, 1):
        cache = CompressedCache(model, "snapkv:budget=12,window=4")
        with torch.no_grad():
            logits = model(prompt, **passing(model, cache), logits_to_keep=kept).logits[:, -1]
            after = model(prompt[:, :1], **passing(model, cache)).logits[:, -1]
        found.append((logits, after))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-4)  # from the same tokens


@hybrids
def test_arguments_that_are_one_set_for_all_layers(name, monkeypatch) -> None:
    """As transformers before 5.19 gives them: a layer has those alone that its type takes."""
    config = made(name).config
    wanted = layer_caches(config)
    kinds, options = cache_utils.get_layer_types_and_kwargs(config)
    one = {key: value for each in options for key, value in each.items()}
    monkeypatch.setattr(cache_utils, "get_layer_types_and_kwargs", lambda _: (kinds, one))
    assert layer_caches(config) == wanted


@hybrids
def test_padded_prompts_are_answered_as_by_the_models_own_cache(name) -> None:
    model = made(name)
    want = answered(model, own(model))
    expect_same(answered(model, CompressedCache(model, "raw")), want)
    again = answered(model, own(model))
    assert torch.equal(
        torch.stack(again.logits), torch.stack(want.logits)
    )  # the model is as it was


@hybrids
def test_prompts_are_read_in_chunks(name) -> None:
    model = made(name)
    want = answered(model, own(model), prefill_chunk_size=9)
    expect_same(answered(model, CompressedCache(model, "raw"), prefill_chunk_size=9), want)


@kinds
def test_a_conversation_goes_on(name) -> None:
    model, found = made(name), []
    ids, mask = prompts()
    more = torch.randint(3, 101, (2, 5), generator=torch.Generator().manual_seed(8))
    for held in (own(model), CompressedCache(model, "raw")):
        first = answered(model, held, new=6).sequences
        whole = torch.cat((first, more), 1)
        there = torch.cat((mask, torch.ones(2, whole.shape[1] - ids.shape[1]).long()), 1)
        found.append(answered(model, held, input_ids=whole, attention_mask=there))
    expect_same(found[1], found[0])


@kinds
def test_beams(name) -> None:
    model = made(name)
    want = answered(model, own(model), num_beams=3)
    assert torch.equal(
        answered(model, CompressedCache(model, "raw"), num_beams=3).sequences, want.sequences
    )


@hybrids
def test_a_selector_keeps_its_budget_in_stored_layers(name) -> None:
    model = made(name)
    cache = CompressedCache(model, "snapkv:budget=12,window=4+k8v4")
    out = answered(model, cache, new=4)
    assert cache.memory().tokens.shape == (len(STORED[name]), 2, 2)
    assert cache.memory().tokens.unique().tolist() == [15]  # and three generated
    assert not torch.stack(out.logits).isnan().any()


@hybrids
def test_memory_counts_every_layer(name) -> None:
    model = made(name)
    cache, theirs = CompressedCache(model, "k8v4"), own(model)
    answered(model, cache)
    answered(model, theirs)
    kept = [theirs.layers[i] for i in range(len(theirs)) if i not in STORED[name]]
    states = cache_bytes(kept)
    if name == "states beside":
        states = sum(
            x.nbytes
            for layer in theirs.layers
            for kind in (layer.conv_states, layer.recurrent_states)
            for x in kind.values()
        )
    report = cache.memory()
    assert report.other_bytes == states > 0
    seen = 2 * 32 - 4  # all but padding
    assert report.full_bytes == states + seen * cache.runtime.shape.token_bytes
    assert report.total_bytes > report.other_bytes


@kinds
def test_a_copy_goes_on_alone(name) -> None:
    model = made(name)
    cache = CompressedCache(model, "raw")
    ids, mask = prompts()
    with torch.no_grad():
        model(ids, attention_mask=mask, **passing(model, cache))
        other = deepcopy(cache)
        there = torch.cat((mask, torch.ones(2, 1).long()), 1)
        given = {"attention_mask": there}
        one, two = torch.full((2, 1), 7), torch.full((2, 1), 9)
        first = model(one, **given, **passing(model, cache)).logits
        second = model(two, **given, **passing(model, other)).logits
        theirs = own(model)
        model(ids, attention_mask=mask, **passing(model, theirs))
        alone = deepcopy(theirs)
        for got, token, held in ((first, one, theirs), (second, two, alone)):
            want = model(token, **given, **passing(model, held)).logits
            expect_near(got, want)


@kinds
@torch.no_grad()
def test_a_cache_in_a_file_goes_on(name, tmp_path) -> None:
    made(name).save_pretrained(tmp_path / "model")
    model = type(made(name)).from_pretrained(tmp_path / "model").eval()
    (ids, mask), path = prompts(), tmp_path / "book.kv"
    cache = CompressedCache(model, "raw")
    model(ids, attention_mask=mask, **passing(model, cache))
    cache.save(path, ids)
    loaded = CompressedCache.load(model, path, ids=ids)
    assert loaded.memory().other_bytes <= cache.memory().other_bytes  # a window may be a view
    for fresh in (ids[:, 9:16], ids[:, 7:8], ids[:, 5:6]):
        mask = torch.cat((mask, torch.ones_like(fresh)), 1)
        want, found = (
            model(fresh, attention_mask=mask, **passing(model, each)).logits
            for each in (cache, loaded)
        )
        assert torch.equal(found, want)


@kinds
def test_a_cleared_cache_takes_another_batch(name) -> None:
    model = made(name)
    cache = CompressedCache(model, "raw")
    answered(model, cache)
    cache.reset()
    assert cache.memory().total_bytes == 0
    ids = prompts()[0][:1]
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    want = answered(model, own(model), **options)
    expect_same(answered(model, cache, **options), want)


@hybrids
def test_newest_tokens_are_taken_back_or_the_reason_is_said(name) -> None:
    model = made(name)
    cache = CompressedCache(model, "raw")
    answered(model, cache, new=2)
    before = cache.runtime.columns
    assert cache.is_croppable is (name not in RECURRENT)
    with pytest.raises(ValueError, match=r"recurrent state|dropped tokens"):
        cache.crop(-1)
    assert cache.runtime.columns == before


@pytest.mark.parametrize("name", ["windows", "chunks", "sinks"])
def test_tokens_are_taken_back_while_windows_are_not_full(name) -> None:
    model, ids, found = made(name), prompts()[0][:, :6], []
    for held in (own(model), CompressedCache(model, "raw")):
        with torch.no_grad():
            model(ids, **passing(model, held))
            held.crop(-3)
            found.append(model(ids[:, 3:] + 1, **passing(model, held)).logits)
    expect_near(found[1], found[0])


@kinds
def test_a_prompt_is_read_once_for_several_caches(name) -> None:
    """Those that do not lead get the states of layers that transformers caches."""
    model, (ids, mask) = made(name), prompts()
    caches = [CompressedCache(model, spec) for spec in ("raw", "raw", "k8v4")]
    caches[0].share_prefill(caches[1:])
    there = torch.cat((mask, torch.ones(2, 1).long()), 1)
    found, theirs = [], own(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, **passing(model, theirs))
        model(ids, attention_mask=mask, **passing(model, caches[0]))
        for held in (theirs, *caches):
            given = {"attention_mask": there, **passing(model, held)}
            found.append(model(torch.full((2, 1), 7), **given).logits)
    for got in found[1:3]:
        expect_near(got, found[0])
    assert (found[3] - found[0]).norm() < 0.2 * found[0].norm()
    others = CompressedCache(made("windows" if name != "windows" else "chunks"), "raw")
    with pytest.raises(ValueError, match="is of another model"):
        CompressedCache(model, "raw").share_prefill([others])


def test_masks_are_made_in_full_only_where_layers_read_those_of_others() -> None:
    sharing = {name for name in CONFIGS if CompressedCache(made(name), "raw").shares}
    assert sharing == {"shared keys", "shared, not cut"}


def test_a_pass_that_computes_readers_for_the_last_columns_alone() -> None:
    model, ids = made("shared keys"), prompts()[0][:1]
    with torch.no_grad():
        want = model(ids, logits_to_keep=3).logits
        got = model(ids, logits_to_keep=3, **passing(model, EmptyCache(model))).logits
        kept = model(ids, logits_to_keep=3, **passing(model, CompressedCache(model, "raw"))).logits
    expect_near(got, want)
    expect_near(kept, want)


@pytest.mark.parametrize("name", ["windows", "chunks", "sinks", "convolutions"])
def test_recorded_tokens_are_taken_back(name) -> None:
    model, (ids, mask) = made(name), prompts()
    found = []
    for held in (own(model), CompressedCache(model, "raw")):
        with torch.no_grad():
            model(ids, attention_mask=mask, **passing(model, held))
            held.activate_past_recording()
            more = torch.tensor([[5, 6, 7], [8, 9, 4]])
            there = torch.cat((mask, torch.ones(2, 3).long()), 1)
            model(more, attention_mask=there, **passing(model, held))
            held.crop(-2)
            there = torch.cat((mask, torch.ones(2, 2).long()), 1)
            out = model(more[:, :1] + 1, attention_mask=there, **passing(model, held))
        found.append(out.logits)
    expect_near(found[1], found[0])


@pytest.mark.parametrize("name", ["windows", "gated, linear", "sinks", "states beside"])
def test_rotations_are_those_of_stored_layers(name) -> None:
    model = made(name)
    cache = CompressedCache(model, "expected-attention:budget=12")
    assert cache.runtime.shape.rope_of(0) is not None
    answered(model, cache, new=3)
    assert int(cache.memory().tokens.max()) == 14


def test_projections_are_those_of_stored_layers() -> None:
    model = made("windows")
    found = output_projections(model, cache_shape(model))
    assert [w.data_ptr() for w in found] == [
        model.model.layers[i].self_attn.o_proj.weight.data_ptr() for i in (1, 3)
    ]


def test_a_second_reading_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"kvzip.* again, and the layers of type slid"):
        CompressedCache(made("windows"), "kvzip:budget=12", tokenizer=object())


@pytest.mark.parametrize("name", ["sinks", "soft cap"])
def test_vectors_are_collected_with_the_models_own_softmax(name) -> None:
    """What a calibration reads of a layer depends on the attention of the layers before it."""
    model, (ids, mask) = made(name), prompts()

    class Last:
        def see(self, layer, query, key, value, there) -> None:
            found[layer] = key

    found: dict[int, torch.Tensor] = {}
    theirs = own(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, **passing(model, theirs))
        for _ in range(2):  # each pass is a text of its own
            model(ids, attention_mask=mask, **passing(model, CollectingCache(model, Last())))
    real = mask.bool()[:, None, :, None]
    want = theirs.layers[3].keys * real
    torch.testing.assert_close(found[1] * real, want, rtol=1e-4, atol=1e-4 * float(want.std()))


@pytest.mark.parametrize("name", ["windows", "windows first", "convolutions"])
def test_a_basis_is_that_of_stored_layers_folded_or_not(name) -> None:
    model, policy = made(name), Wide()
    want = answered(model, own(model))
    expect_same(answered(model, CompressedCache(model, policy)), want, near=1e-4)
    with Fold(model, policy):
        expect_same(answered(model, CompressedCache(model, policy)), want, near=1e-4)


def test_the_layer_of_an_operation_is_that_of_the_model() -> None:
    with pytest.raises(UnsupportedModelError, match="before o_proj of layer 3 "):
        Fold(made("gated, linear"), Wide())


def test_a_basis_is_not_folded_where_layers_read_the_values_of_others() -> None:
    model, policy = made("shared, not cut"), Wide()
    with pytest.raises(UnsupportedModelError, match="layers that read the values of others"):
        Fold(model, policy)
    want = answered(model, own(model))
    expect_same(answered(model, CompressedCache(model, policy)), want, near=1e-4)
