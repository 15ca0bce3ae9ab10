"""Tiny models with layers of several kinds, and what engines answer and hold with each."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kv_policy import CacheShape, parse
from kv_policy.files import write_whole
from kv_runtime import Layout, kept_tokens
from kv_serve.vllm.names import KEY

LONGEST: Final = 1 << 15
MEMORY: Final = 1 << 28  # bytes for keys, values and states
SIZES: Final = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Final = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DELTA: Final = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
LATENTS: Final = {
    "num_hidden_layers": 2,  # so that the longest request fits
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # vLLM's kernel has these two sizes alone
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": LONGEST // 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
ALONE: Final = {"enable_prefix_caching": False}  # beside states, for policies in pages
WINDOWS: Final = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}


@dataclass(frozen=True, slots=True)
class Mixed:
    """A model, and the options of engines that vLLM alone needs for it on a CPU."""

    architecture: str
    kind: str
    more: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict)  # fields that vLLM alone reads
    options: dict[str, Any] = field(default_factory=dict)


MODELS: Final = {
    "deepseek_v2": Mixed(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        LATENTS,
        options={"attention_backend": "CPU_MLA"},
    ),
    "gemma2": Mixed(
        "Gemma2ForCausalLM",
        "gemma2",
        WINDOWS
        | {
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": Mixed("Gemma3ForCausalLM", "gemma3_text", WINDOWS),
    "gemma4": Mixed(
        "Gemma4ForCausalLM",
        "gemma4_text",
        WINDOWS
        | {
            "global_head_dim": 128,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
        },
    ),
    "gpt_oss": Mixed("GptOssForCausalLM", "gpt_oss", EXPERTS | WINDOWS),
    "granite4": Mixed(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        EXPERTS
        | {
            "layer_types": ["mamba", "attention"] * 2,
            "head_dim": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "shared_intermediate_size": 32,
        },
        options=ALONE,
    ),
    "lfm2": Mixed(
        "Lfm2ForCausalLM",
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "head_dim": 32},
        written={
            "block_dim": 128,
            "block_ff_dim": 128,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "conv_use_xavier_init": False,
        },
    ),
    "llama4": Mixed(
        "Llama4ForCausalLM",
        "llama4_text",
        EXPERTS | {"attention_chunk_size": 256, "intermediate_size_mlp": 64},
        options=ALONE,
    ),
    "ministral": Mixed("MinistralForCausalLM", "ministral", WINDOWS),
    "mistral": Mixed("MistralForCausalLM", "mistral", {"sliding_window": 64}),
    "mistral_whole": Mixed("MistralForCausalLM", "mistral", {"sliding_window": LONGEST}),
    "olmo3": Mixed("Olmo3ForCausalLM", "olmo3", WINDOWS),
    "qwen3_5": Mixed("Qwen3_5ForCausalLM", "qwen3_5_text", DELTA),
    "qwen3_next": Mixed(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        EXPERTS | DELTA | {"decoder_sparse_step": 1},
        options={"dtype": "bfloat16"},
    ),
}


def write(folder: Path, name: str) -> None:
    """Write a model with random weights."""
    model = MODELS[name]
    config = CONFIG_MAPPING[model.kind](**SIZES | model.more)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    path = folder / "config.json"
    written = {"architectures": [model.architecture], **model.written}
    write_whole(path, json.dumps(json.loads(path.read_text()) | written).encode())


@contextmanager
def running(folder: str, policy: str | None, **options: Any) -> Iterator[LLM]:
    """Run an engine; without a policy, vLLM alone."""
    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": MEMORY,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "additional_config": {} if policy is None else {KEY: policy},
    }
    engine = LLM(folder, **given | options)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def answers(engine: LLM) -> list[list[int]]:
    """Answer prompts of one to five chunks, more than run at once."""
    draw = torch.Generator().manual_seed(5)
    lengths = (150, 700, 40, 300, 1200, 257)
    prompts = [torch.randint(3, 256, (n,), generator=draw).tolist() for n in lengths]
    settings = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = engine.generate(asked, settings, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


def alike(folder: str, options: dict[str, Any], keeping: str) -> dict[str, object]:
    """Compare the tokens of a policy with those of vLLM alone; or say what either cannot run."""
    found = []
    for policy in (None, keeping):
        try:
            with running(folder, policy, **options) as engine:
                found.append(answers(engine))
        except (AssertionError, RuntimeError, ValueError) as error:
            who = "vLLM" if policy is None else "policy"
            return {"runs": False, "equal": None, "refused_by": who, "why": str(error)[:200]}
    return {"runs": True, "equal": found[0] == found[1], "refused_by": None, "why": None}


def groups(engine: LLM) -> list[KVCacheGroupSpec]:
    """Return vLLM's groups of layers with equal blocks."""
    found: list[KVCacheGroupSpec] = (
        engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    )
    return found


def request_bytes(group: KVCacheGroupSpec, config: VllmConfig, policy: str) -> float:
    """Return the bytes of the longest request in a group of layers of vLLM alone.

    Layers of full attention count as the policy stores them, and without rounding to blocks.
    """
    spec = group.kv_cache_spec
    whole = isinstance(spec, SlidingWindowSpec) and spec.sliding_window >= LONGEST
    if isinstance(spec, FullAttentionSpec) or whole:
        layers, latent = len(group.layer_names), isinstance(spec, MLAAttentionSpec)
        dims = spec.head_size, spec.head_size if latent else spec.head_size_v
        shape = CacheShape(layers, spec.num_kv_heads, 1, *dims, value_in_key=latent)
        parsed = parse(policy)
        token_bytes = Layout.of(parsed, shape, None, 16).token_bytes
        return token_bytes * kept_tokens(parsed, LONGEST, token_bytes)
    blocks = spec.max_memory_usage_bytes(config) / spec.page_size_bytes
    return len(group.layer_names) * blocks * replace(spec, page_size_padded=None).page_size_bytes


def ran(name: str, policy: str, keeping: str) -> dict[str, object]:
    """Compare tokens under a policy that keeps all, and capacity under `policy` if that runs."""
    with TemporaryDirectory() as folder:
        write(Path(folder), name)
        options = MODELS[name].options | ({} if keeping == "raw" else ALONE)
        found = alike(folder, options, keeping)
        return found | (held(folder, options, policy) if found["runs"] else {})


def held(folder: str, options: dict[str, Any], policy: str) -> dict[str, object]:
    """Compare vLLM's own capacity under a policy with what the bytes of a request give."""
    options = options | {"dtype": "bfloat16", "load_format": "dummy"}
    with running(folder, None, **options) as engine:
        config = engine.llm_engine.vllm_config
        request = sum(request_bytes(group, config, policy) for group in groups(engine))
        stock = config.cache_config.kv_cache_size_tokens
    with running(folder, policy, **options) as engine:
        stated = engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        blocks = sorted({group.kv_cache_spec.block_size for group in groups(engine)})
    formula = MEMORY * LONGEST / request
    return {"stock": stock, "stated": stated, "formula": formula, "block_tokens": blocks}
