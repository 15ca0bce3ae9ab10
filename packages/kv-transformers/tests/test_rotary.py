"""Detected rotary embeddings, compared with the models' own at other positions."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Ernie4_5Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    HeliumConfig,
    LlamaConfig,
    NanoChatConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SmolLM3Config,
)

from kv_policy import Rope, parse
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.rotary import _queries, find_ropes, with_ropes
from kv_transformers.support import UnsupportedModelError, cache_shape

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 128,
}
READS = parse("expected-attention:budget=24")
FEW = {**SIZES, "num_hidden_layers": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama, halves": LlamaConfig(**FEW),
    "llama, YaRN": LlamaConfig(**FEW, rope_parameters=YARN),
    "cohere, neighbours": CohereConfig(**FEW),
    "ernie, neighbours": Ernie4_5Config(**FEW, head_dim=16),
    "helium, neighbours": HeliumConfig(**FEW, head_dim=16),
    "nanochat, reversed": NanoChatConfig(**FEW),
    "glm, half of the neighbours": GlmConfig(**FEW, head_dim=16),
    "phi, half of the halves": PhiConfig(**FEW),
    "gpt-neox, a quarter of the halves": GPTNeoXConfig(**{**FEW, "num_key_value_heads": 3}),
    "smollm3, a layer of two": SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
}


def made(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_queries_turned_back_do_not_depend_on_where_they_were_asked(config) -> None:
    model = made(config)
    shape = with_ropes(model, cache_shape(model), READS)
    places = [2, 35, 300]  # none of the probe's own positions
    asked = _queries(model, shape, places)
    for layer in range(shape.layers):
        rope = shape.rope_of(layer)
        plain = rope.turned(asked[layer], -torch.tensor(places)[:, None])
        spread = (plain - plain.mean(1, keepdim=True)).norm() / plain.norm()
        assert spread < 1e-4


def test_bfloat16_tells_rotations_apart() -> None:
    ropes = []
    for dtype in (torch.float32, torch.bfloat16):
        model = made(CONFIGS["cohere, neighbours"], dtype)
        ropes.append(with_ropes(model, cache_shape(model), READS).rope)
    assert ropes[0].pairs == ropes[1].pairs == tuple((2 * i, 2 * i + 1) for i in range(8))


@torch.no_grad()
def test_a_layer_without_positions_is_known_and_served() -> None:
    model = made(CONFIGS["smollm3, a layer of two"])
    cache = CompressedCache(model, READS)
    turning, still = cache.runtime.shape.rope.each
    assert len(turning.frequencies) == 8
    assert still == Rope((), ())
    model(torch.randint(3, 101, (2, 60)), **passing(model, cache))
    model(torch.randint(3, 101, (2, 1)), **passing(model, cache))
    assert (cache.memory().tokens == 25).all()


def test_what_no_rotation_does_is_refused_by_layer() -> None:
    model = made(CONFIGS["llama, halves"])
    attention = model.model.layers[0].self_attn
    turn = attention.forward

    def scaled(hidden_states, position_embeddings, **more):
        cos, sin = position_embeddings
        return turn(hidden_states, position_embeddings=(cos.square(), sin), **more)

    attention.forward = scaled
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of LlamaForCausalLM changes them"):
        CompressedCache(model, READS)
    CompressedCache(model, "snapkv:budget=64")  # which reads no queries


def test_frequencies_that_grow_with_the_text_are_refused() -> None:
    grows = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = made(LlamaConfig(**FEW, rope_parameters=grows))
    with pytest.raises(UnsupportedModelError, match=r"\(dynamic\) changes with the length"):
        CompressedCache(model, READS)


def test_learnt_positions_are_refused() -> None:
    model = made(GPT2Config(vocab_size=101, n_embd=48, n_layer=1, n_head=3, n_positions=512))
    with pytest.raises(UnsupportedModelError):
        CompressedCache(model, READS)


def test_a_model_is_run_once_until_its_frequencies_change() -> None:
    model = made(CONFIGS["llama, halves"])
    runs: list[object] = []
    model.register_forward_hook(lambda *_: runs.append(None))
    shape = cache_shape(model)
    first = find_ropes(model, shape, "a test")
    once = len(runs)
    assert once > 0
    assert find_ropes(model, shape, "another") == first
    assert len(runs) == once
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(0.5)
    slower = find_ropes(model, shape, "a test")
    assert isinstance(first, Rope)
    assert isinstance(slower, Rope)
    assert len(runs) > once
    assert slower.frequencies == pytest.approx([0.5 * each for each in first.frequencies])
