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
