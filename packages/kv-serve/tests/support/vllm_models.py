"""Helpers of tests inside vLLM: skipping without vLLM, and a tiny model for engines."""

import importlib.util
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def skip_without_vllm(
    items: Iterable[pytest.Item], folder: Path, but: Collection[str] = ()
) -> None:
    """Skip the tests of a folder if vLLM is not installed; allow any warning of vLLM.

    Args:
        items: the collected tests.
        folder: the folder of tests that need vLLM.
        but: files there that do not need it.
    """
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if item.path.parent != folder or item.path.name in but:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; `nox -s vllm` has one"))


def write_config(
    folder: Path, architecture: str = "LlamaForCausalLM", kind: str = "llama", **more: Any
) -> None:
    """Write the configuration of a tiny model; its weights are drawn when it is loaded."""
    config = TINY | {"architectures": [architecture], "model_type": kind} | more
    (folder / "config.json").write_text(json.dumps(config))


def write_weights(
    folder: Path, architecture: str = "LlamaForCausalLM", kind: str = "llama", **more: Any
) -> None:
    """Write a tiny model with float32 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    drawn = {"initializer_range": 0.1, "torch_dtype": "float32"}
    write_config(folder, architecture, kind, **drawn, **more)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))
    made.save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are single bytes, but for the first and last of a sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {"<unk>": 0, "<s>": TINY["bos_token_id"], "</s>": TINY["eos_token_id"]}
    letters = alphabet[: TINY["vocab_size"] - len(own)]  # three bytes have no room
    names = own | {each: len(own) + i for i, each in enumerate(letters)}
    raw = Tokenizer(models.BPE(vocab=names, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(folder)


def write_adapter(model: Path, folder: Path, seed: int, rank: int = 8) -> None:
    """Write a random LoRA adapter, and in `merged` the model with its weights added."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made, targets, found = AutoModelForCausalLM.from_pretrained(model), ["q_proj", "v_proj"], {}
    for name, part in made.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        down = 0.1 * torch.randn(rank, part.in_features)
        up = 0.5 * torch.randn(part.out_features, rank)
        found[f"base_model.model.{name}.lora_A.weight"] = down
        found[f"base_model.model.{name}.lora_B.weight"] = up
        part.weight.data += up @ down
    made.save_pretrained(folder / "merged")
    save_file(found, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
