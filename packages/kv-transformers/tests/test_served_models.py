"""Creating a cache for an unsupported model raises with the right reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BltConfig,
    BltForCausalLM,
    DiffLlamaConfig,
    DogeConfig,
    Gemma4TextConfig,
    Kosmos2Config,
    Kosmos2ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MistralConfig,
    MllamaForCausalLM,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RwkvConfig,
    SiglipVisionConfig,
    T5Config,
    T5ForConditionalGeneration,
    xLSTMConfig,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.support import UnsupportedModelError
from own_llama import IDS, SIZES, llama

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def of(config: Any) -> Callable[[], PreTrainedModel]:
    return lambda: AutoModelForCausalLM.from_config(config)


def blt() -> PreTrainedModel:
    part = SMALL | {"num_attention_heads": 4, "intermediate_size": 32}
    whole = part | {"num_key_value_heads": 4}
    config = BltConfig(
        vocab_size=64,
        patcher_config=part,
        encoder_config=whole,
        decoder_config=whole,
        global_config=whole,
        encoder_hash_byte_group_vocab=50,
        encoder_hash_byte_group_size=[2, 3],
        pad_token_id=0,
    )
    return BltForCausalLM(config)


def mllama() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_hidden_layers": 3}
    return MllamaForCausalLM(
        MllamaTextConfig(**sizes, cross_attention_layers=[1], rope_parameters=rope)
    )


def gemma4(**more: object) -> Gemma4TextConfig:
    sizes: dict[str, object] = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 101,
        "global_head_dim": 16,
        "sliding_window": 16,
        "num_kv_shared_layers": 0,
    }
    return Gemma4TextConfig(**(SIZES | sizes | more))


def bert() -> PreTrainedModel:
    return BertForMaskedLM(BertConfig(**SMALL, num_attention_heads=4, intermediate_size=32))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    )


def kosmos() -> PreTrainedModel:
    text = {"vocab_size": 64, "embed_dim": 32, "layers": 1, "ffn_dim": 32, "attention_heads": 4}
    part = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return Kosmos2ForConditionalGeneration(
        Kosmos2Config(text_config=text, vision_config=part | {"num_attention_heads": 4})
    )


REFUSED = {
    "differential attention": (of(DiffLlamaConfig(**SIZES)), r"Attention itself \(lambda_q1, "),
    "a dynamic mask": (of(DogeConfig(**SIZES)), r"parameters of DogeAttention itself \(A\)"),
    "cross-attention": (mllama, "attends in layer 1 to something other than the layer's own"),
    "several stacks": (blt, "is not one stack of layers: its configuration has no num_hidden"),
    "a recurrence (rwkv)": (of(RwkvConfig(**SMALL)), "keeps its own kind of state"),
    "a recurrence (xlstm)": (of(xLSTMConfig(**SMALL, num_heads=2)), "keeps its own kind of"),
    "a recurrence (mamba)": (of(MambaConfig(**SMALL)), "has no num_attention_heads"),
    "a base without generate": (
        lambda: AutoModel.from_config(xLSTMConfig(**SMALL, num_heads=2)),
        "is not one stack of layers",
    ),
    "an encoder": (t5, "has an encoder; only decoder-only models"),
    "both directions": (bert, "attends in both directions in layer 0"),
    "masks of its own": (kosmos, "makes 4D masks by code of its own in Kosmos2TextTransformer"),
    "windows alone": (of(MistralConfig(**SIZES, sliding_window=8)), "has only layers of type slid"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_is_refused_for_what_is_the_reason(kind) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModelError, match=reason):
        CompressedCache(make(), "raw")


def test_layers_that_are_all_alike_are_served_whatever_their_heads_are_called() -> None:
    torch.manual_seed(5)
    config = gemma4(layer_types=["full_attention"] * 4)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = CompressedCache(model, "raw")
    assert cache.runtime.shape.key_dim == 16
    options = {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, **options, **passing(model, cache)), want)


def test_heads_that_differ_by_layer_are_refused() -> None:
    model = llama()
    model.config.per_layer_config = {1: {"num_key_value_heads": 4}}
    with pytest.raises(UnsupportedModelError, match=r"different KV heads \(2 x 8, 4 x 8\)"):
        CompressedCache(model, "raw")


NO_WINDOW = "sliding_window=None computes the same"


def test_a_window_is_advised_away_where_that_works() -> None:
    sizes = SIZES | {"max_position_embeddings": 64}
    config = MistralConfig(**sizes, sliding_window=16)
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=rf"up to 16 tokens, .* {NO_WINDOW}"):
        CompressedCache(model, "raw")
    free = AutoModelForCausalLM.from_config(MistralConfig(**sizes, sliding_window=None)).eval()
    free.load_state_dict(model.state_dict())
    options = {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(IDS, **options)
    got = free.generate(IDS, **options, **passing(free, CompressedCache(free, "raw")))
    assert torch.equal(got, want)


def test_it_is_not_advised_where_it_does_nothing() -> None:
    config = RecurrentGemmaConfig(**SMALL, num_attention_heads=4, intermediate_size=32)
    with pytest.raises(UnsupportedModelError, match="has only layers of type") as caught:
        CompressedCache(AutoModelForCausalLM.from_config(config), "raw")
    assert "sliding_window=None" not in str(caught.value)


def test_weights_that_are_offloaded_or_not_there() -> None:
    offloaded = llama()
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    for model in (offloaded, llama().to("meta")):
        with pytest.raises(UnsupportedModelError, match="on the meta device: they are offloaded"):
            CompressedCache(model, "raw")


@torch.no_grad()
def test_a_model_that_was_moved_since() -> None:
    model = llama()
    cache = CompressedCache(model, "raw")
    cache._device = torch.device(
        "meta"
    )  # as if it was created there, as the test machine has one device
    with pytest.raises(RuntimeError, match="runs on cpu, but this cache was made while it was"):
        model(IDS, **passing(model, cache))


def test_a_vision_tower_is_not_taken_for_the_decoder() -> None:
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES))
    model = LlavaForConditionalGeneration(config).eval()
    options = {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(IDS, **options)
    cache = CompressedCache(model, "raw")
    assert torch.equal(model.generate(IDS, **options, **passing(model, cache)), want)
    assert {c._attn_implementation for c in (config.vision_config, config.text_config)} == {"sdpa"}
