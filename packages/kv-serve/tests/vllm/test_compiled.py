"""Models that vLLM compiles, which is its default: attention is no part of what is traced."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from transformed import by_transformers

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
COUNT = 24


@pytest.mark.parametrize("policy", ["k8v4", "snapkv:budget=24,window=8+k8v4"])
def test_a_compiled_model_gives_the_tokens_of_an_eager_one(
    start: Start,
    greedy: Greedy,
    weights: str,
    prompts: list[list[int]],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from torch._dynamo.utils import counters

    # vLLM's own tests on a CPU: the graph is traced as ever, and then run without a C++ compiler.
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    torch._dynamo.reset()
    counters.clear()
    options = {
        "enforce_eager": False,
        "kv_cache_memory_bytes": 1 << 20,
        "max_model_len": 256,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "poison": True,
    }
    with torch._dynamo.config.patch(disable=False), start(weights, policy, **options) as engine:
        # Eager engines give these: other tests see to that.
        assert greedy(engine, prompts, COUNT) == by_transformers(weights, policy, prompts, COUNT)
    assert counters["stats"]["unique_graphs"]
