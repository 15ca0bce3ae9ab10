"""Prompts that the scheduler splits into chunks and mixes with decode steps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from transformed import by_transformers

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
Patterns = list[tuple[list[int], list[int]]]
OPTIONS = {
    "kv_cache_memory_bytes": 1 << 26,
    "max_model_len": 1024,
    "block_size": 32,
    "max_num_batched_tokens": 160,
    "max_num_seqs": 2,
}


@pytest.mark.model
@pytest.mark.parametrize("policy", ["k8v4", pytest.param("raw", marks=pytest.mark.slow)])
def test_a_prompt_in_pieces_goes_on_as_it_must(
    start: Start, greedy: Greedy, smollm2: str, patterns: Patterns, policy: str
) -> None:
    with start(smollm2, policy, **OPTIONS) as engine:
        answers = greedy(engine, [prompt for prompt, _ in patterns], 24)
    assert answers == [more for _, more in patterns]


def test_an_engine_without_a_policy_is_stock_in_a_process_with_policies(
    start: Start, greedy: Greedy, weights: str, prompts: list[list[int]]
) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    small = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 256, "dtype": "float32"}
    with start(weights, skip_tokenizer_init=True, **OPTIONS | small) as engine:
        layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
        assert {type(layer.impl) for layer in layers.values()} == {CPUAttentionBackendImpl}
        assert greedy(engine, prompts, 24) == by_transformers(weights, None, prompts, 24)
