import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForCausalLM, GPT2Config, GPT2LMHeadModel

from kv_transformers.collecting import output_projections
from kv_transformers.modules import attention_modules
from kv_transformers.support import UnsupportedModelError, cache_shape


def bart() -> BartForCausalLM:
    config = BartConfig(
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        vocab_size=50,
        max_position_embeddings=32,
    )
    return BartForCausalLM(config)


def own(model: BartForCausalLM, layer: int) -> nn.Module:
    return model.model.decoder.layers[layer].self_attn


def test_cross_attention_beside_self_attention_is_left_out() -> None:
    model = bart()
    names = [name for name, m in model.named_modules() if getattr(m, "layer_idx", None) == 0]
    assert len(names) == 2  # self-attention comes first, so the last found would be the wrong one
    found = attention_modules(model, range(2))
    assert {layer: module for layer, (_, module) in found.items()} == {
        layer: own(model, layer) for layer in range(2)
    }
    assert found[1][0] == "decoder.layers.1.self_attn"
    for layer, weight in enumerate(output_projections(model, cache_shape(model))):
        assert torch.equal(weight, own(model, layer).out_proj.weight)


def test_the_modules_own_word_counts_more_than_its_name() -> None:
    model = bart()
    for layer in model.model.decoder.layers:
        layer.self_attn.is_cross_attention, layer.encoder_attn.is_cross_attention = True, False
    found = attention_modules(model, range(2))
    assert [found[i][0] for i in range(2)] == [f"decoder.layers.{i}.encoder_attn" for i in range(2)]
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, add_cross_attention=True)
    found = attention_modules(GPT2LMHeadModel(config), range(2))
    assert [found[i][0] for i in range(2)] == ["h.0.attn", "h.1.attn"]


def test_modules_that_cannot_be_told_apart_are_refused_by_name() -> None:
    model = bart()
    for layer in model.model.decoder.layers:
        layer.one, layer.other = layer.self_attn, layer.encoder_attn
        del layer.self_attn, layer.encoder_attn
    with pytest.raises(UnsupportedModelError, match=r"several attention modules, .*0\.one \(Bart"):
        attention_modules(model, range(2))


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_every_layer_has_its_own(make, name: str) -> None:
    model = make(name)
    found = attention_modules(model, range(3))
    assert [found[i][1] for i in range(3)] == [layer.self_attn for layer in model.model.layers]
    assert sorted(attention_modules(model, range(2))) == [0, 1]


def test_what_stands_around_attention_is_not_taken_for_it(make) -> None:
    model = make("llama")
    for i, layer in enumerate(model.model.layers):
        layer.layer_idx = layer.mlp.layer_idx = i
    found = attention_modules(model, range(3))
    assert [found[i][1] for i in range(3)] == [layer.self_attn for layer in model.model.layers]


def test_a_layer_without_attention_is_missing(make) -> None:
    model = make("llama")
    model.model.layers[1].self_attn.layer_idx = None
    assert sorted(attention_modules(model, range(3))) == [0, 2]
    with pytest.raises(UnsupportedModelError, match=r"layer 1 of .*, unnamed, has no output"):
        output_projections(model, cache_shape(model))
