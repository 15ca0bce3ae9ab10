"""Tiny models with layers that vLLM keeps: windows, chunks and states, beside full attention."""

from pathlib import Path
from typing import Any, Final

import pytest

from kv_serve.vllm.versions import installed, minor
from vllm_models import write_config, write_weights

LONGEST, BLOCK = 1024, 32
# Models that vLLM computes on a CPU from this version on, and why it did not before.
LACKING: Final = {
    "granite4": ((0, 32), "has no float32 convolution on a CPU"),
    "gpt_oss": ((0, 31), "has no float32 sinks on a CPU"),
}
# The same of a checkpoint that transformers wrote.
UNREAD: Final = {"gemma4_shared": ((0, 30), "expects norms of keys in layers without keys")}
MIXED = ["sliding_attention", "full_attention"] * 2
GEMMA3 = ("Gemma3ForCausalLM", "gemma3_text", {"layer_types": MIXED, "sliding_window": 48})
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": GEMMA3,
    "gemma3_full": (  # vLLM divides the layers of full attention into three groups
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "layer_types": [*MIXED, "full_attention", "full_attention", "full_attention"],
            "sliding_window": 48,
        },
    ),
    "gemma3n": (  # the last two layers read the keys and values of the two before
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 48,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 6,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            "layer_types": MIXED,
            "sliding_window": 48,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma4_shared": (  # the last two layers read the keys and values of the two before
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": [*MIXED, "full_attention", "full_attention"],
            "sliding_window": 48,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 2,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "gpt_oss",
        EXPERTS | {"layer_types": MIXED, "sliding_window": 48},
    ),
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        EXPERTS
        | {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "shared_intermediate_size": 32,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "llama4_text",
        EXPERTS | {"attention_chunk_size": 96, "intermediate_size_mlp": 64},
    ),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": LONGEST}),
    "olmo3": ("Olmo3ForCausalLM", "olmo3", {"layer_types": MIXED, "sliding_window": 48}),
}
# vLLM's own CPU attention over Mamba's states fails with prefix caching.
ALONE = {"granite4": {"enable_prefix_caching": False}}


def options(**more: Any) -> dict[str, Any]:
    """Return the options of engines that read prompts in chunks."""
    return {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 1 << 24,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": 160,
        "block_size": BLOCK,
    } | more


def folder_of(made: Path, name: str, *, weights: bool = True, **more: Any) -> str:
    """Write a model of these to a folder, with float32 weights or without any.

    A test of a model that the installed vLLM cannot run on a CPU is skipped.
    """
    here = minor(installed() or "")
    lacking = LACKING | (UNREAD if weights else {})
    if here and name in lacking and here < lacking[name][0]:
        (major, least), what = lacking[name]
        pytest.skip(f"vLLM before {major}.{least} {what}")
    architecture, kind, own = MODELS[name]
    given = {
        "num_hidden_layers": 4,
        "max_position_embeddings": 1 << 15,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    (write_weights if weights else write_config)(made, architecture, kind, **given | own | more)
    return str(made)
