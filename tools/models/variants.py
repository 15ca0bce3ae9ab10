"""Other configurations of an architecture, where released models differ in what a cache sees."""

from collections.abc import Mapping
from typing import Any, Final

from tools.models.exceptions import DEFAULT_ROPE, EXCEPTIONS, TWO_KINDS

ROTARY: Final = {"rope_theta": 10000.0}
ALL_FULL: Final = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
LLAMA3: Final = {
    **ROTARY,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG: Final = {
    **ROTARY,
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
YARN: Final = {
    **ROTARY,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC: Final = {
    **ROTARY,
    "rope_type": "dynamic",
    "factor": 2.0,
    "original_max_position_embeddings": 48,
}
# By architecture and what is different, the values beside those of `exceptions.py`.
VARIANTS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "cohere": {"normalized queries and keys": {"use_qk_norm": True}},
    "cohere2": {"all full": ALL_FULL},
    "exaone4": {"all full": {**ALL_FULL, "sliding_window": None}},
    "falcon": {
        "ALiBi": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
        "one KV head": {"alibi": False, "new_decoder_architecture": False, "multi_query": True},
    },
    "gemma2": {"no soft cap": {"attn_logit_softcapping": None}},
    "gemma3_text": {"all full": ALL_FULL},
    "gemma3n_text": {"no sharing": {"num_kv_shared_layers": 0}},
    "gemma4_text": {
        "experts": {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "sharing": {
            "num_hidden_layers": 6,
            "layer_types": TWO_KINDS * 3,
            "num_kv_shared_layers": 2,
        },
    },
    "gpt2": {
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        "upcast": {"reorder_and_upcast_attn": True},
    },
    "gpt_bigcode": {"a KV head per query head": {"multi_query": False}},
    "gpt_oss": {"all full": ALL_FULL},
    "granitemoehybrid": {"attention only": ALL_FULL},
    "lfm2": {"all full": ALL_FULL},
    "llama": {
        "bias": {"attention_bias": True, "mlp_bias": True},
        "dynamic rotary scaling": {"rope_parameters": DYNAMIC},
        "llama3 rotary scaling": {"rope_parameters": LLAMA3},
        "yarn rotary scaling": {"rope_parameters": YARN},
    },
    "llama4_text": {"all full": {**ALL_FULL, "attention_chunk_size": None}},
    "minimax": {"all full": ALL_FULL},
    "mistral": {"sliding window": {"sliding_window": 8}},
    "mixtral": {"sliding window": {"sliding_window": 8}},
    "olmo3": {"all full": ALL_FULL},
    "persimmon": {"no normalized queries": {"qk_layernorm": False}},
    "phi": {"normalized queries and keys": {"qk_layernorm": True}},
    "phi3": {
        "long rotary scaling": {"rope_parameters": LONG},
        "partial rotary": {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5}},
        "sliding window": {"sliding_window": 8},
    },
    "qwen2": {
        "sliding window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    },
    "qwen3": {
        "sliding window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    },
    "stablelm": {"normalized queries and keys": {"qk_layernorm": True}},
    "starcoder2": {"sliding window": {"sliding_window": 8}},
}


def given(architecture: str, variant: str) -> Mapping[str, Any]:
    """Return what the small configuration of an architecture, or of a variant, needs.

    Raises:
        KeyError: the architecture has no such variant.
    """
    base = EXCEPTIONS.get(architecture, {})
    return {**base, **VARIANTS[architecture][variant]} if variant else base
