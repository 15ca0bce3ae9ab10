"""A tiny Llama with its own configuration, and two rows of input."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": None,
}
IDS = torch.randint(3, 101, (2, 12), generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "attention_mask": MASK}


def llama(implementation: str | None = None, **sizes: object) -> PreTrainedModel:
    torch.manual_seed(7)
    config = LlamaConfig(**(SIZES | sizes))
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
