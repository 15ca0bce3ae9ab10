"""Sizes of tiny models with latent attention, and models of random weights."""

from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

RANK, ROTATED, HEADS = 12, 8, 4
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "q_lora_rank": 16,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}
EXPERTS: Final[dict[str, Any]] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def drawn(config: Any, kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """Return a model whose weights are large enough for attention to matter."""
    torch.manual_seed(23)
    model = AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    return model.eval()
