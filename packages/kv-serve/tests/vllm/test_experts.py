"""A model with experts in every layer: its keys and values are compressed as those of any other."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from transformed import by_transformers
from vllm_models import write_experts

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
COUNT = 12
OPTIONS = {
    "kv_cache_memory_bytes": 1 << 21,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model with experts."""
    folder = tmp_path_factory.mktemp("experts")
    write_experts(folder)
    return str(folder)


@pytest.mark.parametrize("policy", ["k8v4", "kv-compress:budget=24,window=8+k8v4"])
def test_its_tokens_are_those_of_transformers(
    start: Start, greedy: Greedy, experts: str, prompts: list[list[int]], policy: str
) -> None:
    with start(experts, policy, **OPTIONS) as engine:
        found = greedy(engine, prompts, COUNT)
    assert found == by_transformers(experts, policy, prompts, COUNT)
    assert found != by_transformers(experts, None, prompts, COUNT)
