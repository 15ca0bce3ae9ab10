"""Using a compressed cache does not affect a model's other calls."""

import copy
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    PreTrainedModel,
    StaticCache,
)

from kv_transformers import CompressedCache, uninstall
from kv_transformers.cache_argument import passing
from kv_transformers.support import UnsupportedModelError
from own_llama import GREEDY, IDS, MASK, SIZES, llama


def used(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model after a compressed cache was created for it and used."""
    with torch.no_grad():
        model(IDS, **passing(model, CompressedCache(model, "raw")))
    return model


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_implementation_that_was_chosen_is_used_without_a_compressed_cache(
    implementation,
) -> None:
    model = llama(implementation)
    with torch.no_grad():
        want = model(IDS, attention_mask=MASK).logits
        got = used(model)(IDS, attention_mask=MASK).logits
    assert model.config._attn_implementation == implementation
    assert torch.equal(got, want)


def test_a_static_cache_answers_as_before() -> None:
    model = llama()
    options = dict(GREEDY, cache_implementation="static")
    want = model.generate(IDS, **options)
    assert torch.equal(used(model).generate(IDS, **options), want)


@torch.no_grad()
def test_a_static_cache_gets_a_mask_made_at_its_time() -> None:
    """Its offset is a tensor that `update` changes, so a mask created later would differ."""
    model = used(llama())
    full, static = DynamicCache(), StaticCache(model.config, max_cache_len=32)
    for part in (IDS[:, :7], IDS[:, 7:9], IDS[:, 9:]):
        want = model(part, **passing(model, full)).logits
        got = model(part, **passing(model, static)).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_model_with_sinks_keeps_them() -> None:
    config = GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    with torch.no_grad():
        want = model(IDS).logits
        got = model(IDS, **passing(model, CompressedCache(model, "raw"))).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(IDS).logits, want)


@torch.no_grad()
def test_attention_weights_are_given_as_before() -> None:
    model = llama("eager")
    want = model(IDS, output_attentions=True).attentions
    got = used(model)(IDS, output_attentions=True).attentions
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="output_attentions was given together"):
        model(IDS, output_attentions=True, **passing(model, CompressedCache(model, "raw")))


def test_continuous_batching_finds_its_implementation() -> None:
    model, never = used(llama()), llama()
    model.init_continuous_batching()  # rejects unknown implementations
    never.init_continuous_batching()  # may change the implementation, depending on the version
    assert model.config._attn_implementation == never.config._attn_implementation


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_a_compressed_cache_serves_whatever_is_chosen_later(implementation) -> None:
    model = llama()
    want = model.generate(IDS, **GREEDY)
    cache = CompressedCache(model, "raw")
    model.set_attn_implementation(implementation)
    assert torch.equal(model.generate(IDS, **GREEDY, **passing(model, cache)), want)
    assert model.config._attn_implementation == implementation


@torch.no_grad()
def test_an_error_or_an_interrupt_leaves_nothing_behind(monkeypatch) -> None:
    model = llama()
    want = model(IDS).logits
    for error in (ValueError, KeyboardInterrupt):
        cache = CompressedCache(model, "raw")

        def fail(*args: object, error: type[BaseException] = error) -> None:
            raise error

        monkeypatch.setattr(cache.runtime, "attend", fail)
        with pytest.raises(error):
            model(IDS, **passing(model, cache))
        assert torch.equal(model(IDS).logits, want)
        assert model.config._attn_implementation == "sdpa"
        model(IDS, **passing(model, CompressedCache(model, "raw")))


@torch.no_grad()
def test_threads_with_and_without_a_compressed_cache_share_a_model() -> None:
    model = llama()
    want = model(IDS, attention_mask=MASK).logits
    inside, go_on = threading.Event(), threading.Event()
    cache, found = CompressedCache(model, "raw"), []

    def compressed() -> None:
        with torch.no_grad():
            found.append(model(IDS, attention_mask=MASK, **passing(model, cache)).logits)

    thread = threading.Thread(target=compressed)

    def stop(*_: object) -> None:
        if threading.current_thread() is thread:
            inside.set()
            assert go_on.wait(60)

    model.model.layers[1].register_forward_pre_hook(stop)
    thread.start()
    assert inside.wait(60)
    beside = model(IDS, attention_mask=MASK).logits  # the other pass is between two layers
    go_on.set()
    thread.join()
    assert torch.equal(beside, want)
    real = MASK.bool()
    torch.testing.assert_close(found[0][real], want[real], rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_two_policies_interleave_on_one_model() -> None:
    model = llama()
    caches = [CompressedCache(model, policy) for policy in ("raw", "streaming:budget=8", "raw")]
    steps = [IDS[:, :9], IDS[:, 9:10], IDS[:, 10:11]]
    turns = [[model(step, **passing(model, c)).logits for c in caches] for step in steps]
    for turn in turns:
        assert torch.equal(turn[0], turn[2])
    whole = model(IDS[:, :11]).logits[:, -1:]
    torch.testing.assert_close(turns[-1][0], whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(turns[-1][1], whole, atol=1e-3)


@torch.no_grad()
def test_uninstalled_nothing_is_left() -> None:
    model, never = llama(), llama()
    cache = CompressedCache(model, "raw")
    uninstall(model)
    for module, other in zip(model.modules(), never.modules(), strict=True):
        assert len(module._forward_hooks) == len(other._forward_hooks)
        assert len(module._forward_pre_hooks) == len(other._forward_pre_hooks)
        assert vars(module).keys() == vars(other).keys()
    with pytest.raises(RuntimeError, match=r"kv_transformers\.uninstall was called"):
        model(IDS, **passing(model, cache))
    uninstall(model)  # nothing to do
    model(IDS, **passing(model, CompressedCache(model, "raw")))


def test_a_model_that_is_refused_is_not_changed() -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, add_cross_attention=True)
    model = GPT2LMHeadModel(config)
    before = copy.copy(vars(model))
    with pytest.raises(UnsupportedModelError, match="attends to an encoder"):
        CompressedCache(model, "raw")
    assert vars(model).keys() == before.keys()
    assert not model._forward_hooks
    assert not model.transformer._forward_hooks


@torch.no_grad()
def test_a_compiled_model_with_its_own_cache_is_still_one_graph() -> None:
    model = used(llama())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    want = model(IDS, use_cache=False).logits
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, want)
