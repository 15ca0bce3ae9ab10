"""A cache is bound to one model, and a pass that does not attend to it raises."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Phi3Config,
    PreTrainedModel,
)

from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.support import UnsupportedModelError
from own_llama import GREEDY, IDS, MASK, SIZES, llama


def other_model(kind: str, model: PreTrainedModel) -> PreTrainedModel:
    if kind == "copied":
        return copy.deepcopy(model)
    if kind == "of its own cache":
        other = llama()
        CompressedCache(other, "raw")
        return other
    return llama(num_hidden_layers={"loaded again": 2, "more": 5, "fewer": 1}[kind])


@pytest.mark.parametrize("kind", ["copied", "loaded again", "of its own cache", "more", "fewer"])
@torch.no_grad()
def test_a_cache_is_refused_by_any_other_model(kind) -> None:
    model = llama()
    cache = CompressedCache(model, "raw")
    other = other_model(kind, model)
    with pytest.raises(RuntimeError, match="was made for another model"):
        other(IDS, **passing(other, cache))
    assert not cache.is_initialized
    whole = other(IDS).logits
    mine = CompressedCache(other, "raw")
    torch.testing.assert_close(
        other(IDS, **passing(other, mine)).logits, whole, rtol=1e-4, atol=1e-5
    )
    model(IDS, **passing(model, cache))  # nothing was lost


class Around(nn.Module):
    """A wrapper that calls a method instead of the module, as adapters do."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.inner.forward(*args, **kwargs)


@torch.no_grad()
def test_a_wrapper_and_the_base_model_serve_the_cache_of_the_model() -> None:
    model = llama()
    want = model(IDS).logits
    cache = CompressedCache(model, "raw")
    got = Around(model)(IDS, **passing(model, cache)).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    base = model.model(IDS, **passing(model.model, CompressedCache(model, "raw")))
    torch.testing.assert_close(model.lm_head(base[0]), want, rtol=1e-4, atol=1e-5)
    within = CompressedCache(model.model, "raw")
    got = model(IDS, **passing(model, within)).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_model_that_says_it_changes_keys_is_refused() -> None:
    model = llama()
    model.model.layers[1].self_attn.num_key_value_groups = 1
    with pytest.raises(UnsupportedModelError, match="changes keys before attention"):
        CompressedCache(model, "raw")


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("mask", [None, torch.zeros(2, 1, 12, 12)], ids=["none", "of 4 dimensions"])
@torch.no_grad()
def test_keys_that_are_changed_after_update_are_noticed(layers, mask, monkeypatch) -> None:
    """Changed keys lose their mark, also in the last or only layer."""
    model = llama(num_hidden_layers=layers)
    cache = CompressedCache(model, "raw")
    handed = cache.update

    def scaled(key: torch.Tensor, value: torch.Tensor, layer: int, **rest: object) -> object:
        key, value = handed(key, value, layer, **rest)
        return (torch.mul(key, 1.5), value) if layer == layers - 1 else (key, value)

    monkeypatch.setattr(cache, "update", scaled)
    with pytest.raises(
        (RuntimeError, ValueError), match=r"changes? (keys|them)|nothing attended|2D"
    ):
        model(IDS, attention_mask=mask, **passing(model, cache))


@torch.no_grad()
def test_attention_of_a_modules_own_is_noticed() -> None:
    """A layer calls torch instead of its model's attention function."""
    model = llama(num_hidden_layers=1)
    cache = CompressedCache(model, "raw")

    class Own(type(model.model.layers[0].self_attn)):
        def forward(self, hidden_states: torch.Tensor, **rest: object) -> object:
            heads = hidden_states.unflatten(-1, (4, 8)).transpose(1, 2)
            held = rest["cache"] if "cache" in rest else rest["past_key_values"]
            held.update(heads[:, :2], heads[:, :2], 0)
            return hidden_states, None

    model.model.layers[0].self_attn.__class__ = Own
    with pytest.raises(RuntimeError, match="nothing attended to the fresh keys of layer 0"):
        model(IDS, **passing(model, cache))


@torch.no_grad()
def test_a_cache_that_the_model_ignores_is_noticed() -> None:
    model = llama(num_hidden_layers=1)
    cache = CompressedCache(model, "raw")
    model.model.layers = nn.ModuleList()
    with pytest.raises(RuntimeError, match="did not use it"):
        model(IDS, **passing(model, cache))


def longrope() -> PreTrainedModel:
    torch.manual_seed(3)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    }
    config = Phi3Config(
        **SIZES,
        sliding_window=None,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=rope,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_model_that_sets_its_cache_aside_says_so() -> None:
    model = longrope()
    row, options = IDS[:1], {"do_sample": False}
    want = model.generate(row, max_new_tokens=4, **options)
    long = model.generate(row, max_new_tokens=9, **options)
    cache = CompressedCache(model, "raw")
    got = model.generate(row, max_new_tokens=4, **options, **passing(model, cache))
    assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="discards its cache past 16 tokens"):
        model.generate(
            row, max_new_tokens=9, **options, **passing(model, CompressedCache(model, "raw"))
        )
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(each.generate(row, max_new_tokens=9, **options), long)


def test_no_cache_and_a_cache_at_once_is_refused() -> None:
    model = llama()
    with pytest.raises(ValueError, match="use_cache=False was given together"):
        model.generate(
            IDS, **GREEDY, use_cache=False, **passing(model, CompressedCache(model, "raw"))
        )


def test_a_cache_of_the_other_kind_is_not_disturbed() -> None:
    model = llama()
    CompressedCache(model, "raw")
    own = DynamicCache()
    first = model.generate(IDS, **GREEDY, **passing(model, own))
    more = torch.cat([first, IDS[:, :3]], 1)
    mask = torch.cat([MASK, torch.ones(2, more.shape[1] - 12, dtype=torch.long)], 1)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask}
    again = model.generate(more, **options, **passing(model, own))
    assert torch.equal(again, model.generate(more, **options))
