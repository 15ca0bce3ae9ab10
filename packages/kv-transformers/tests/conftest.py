"""Tiny random models of several architectures, and inputs for them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kv_transformers import CompressedCache
from native import need
from small_sizes import SIZES

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=10),
    "phi3": Phi3Config(**SIZES, sliding_window=None),
}


def _make(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()


def _batch(lengths: tuple[int, ...] = (23, 9, 17)) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    width = max(lengths)
    ids = torch.randint(3, 101, (len(lengths), width))
    mask = torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@pytest.fixture
def make() -> Callable[..., PreTrainedModel]:
    """Create a tiny model of an architecture."""
    return _make


@pytest.fixture
def batch() -> Callable[..., dict[str, torch.Tensor]]:
    """Create random prompts of the given lengths, padded on the left."""
    return _batch


@pytest.fixture(params=["torch", "cpu"])
def compressed(request: pytest.FixtureRequest) -> Callable[..., CompressedCache]:
    """Create a compressed cache, with each backend in turn."""
    need(request.param)
    return partial(CompressedCache, backend=request.param)
