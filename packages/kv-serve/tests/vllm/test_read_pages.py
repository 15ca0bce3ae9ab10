"""Decode steps that read some pages, by bounds that are in the pages of vLLM's memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from transformed import by_transformers

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
COMPRESS = "kv-compress:rate=4,floor=16"
SOME = "quest:budget=32,sinks=0,recent=0,whole=0"  # two pages of up to ten
CODED = f"{SOME},by=codes"
ALL = "quest:budget=100%,sinks=0,recent=0,whole=0"
COUNT = 24
OPTIONS = {
    "kv_cache_memory_bytes": 1 << 20,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "poison": True,
}


@pytest.mark.parametrize("policy", ["k8v4", f"{COMPRESS}+k8v4"])
def test_a_step_that_reads_all_pages_answers_as_one_that_selects_none(
    start: Start, weights: str, prompts: list[list[int]], greedy: Greedy, policy: str
) -> None:
    with start(weights, f"{policy}+{ALL}", **OPTIONS) as engine:
        found = greedy(engine, prompts, COUNT)
    assert found == by_transformers(weights, policy, prompts, COUNT)
    assert found != by_transformers(weights, f"{policy}+{SOME}", prompts, COUNT)


@pytest.mark.parametrize(("reading", "beside"), [(SOME, 2 * 2 * 32), (CODED, 16 * (2 * 4 + 2))])
def test_the_bytes_of_bounds_are_in_those_of_blocks(
    start: Start,
    weights: str,
    prompts: list[list[int]],
    greedy: Greedy,
    reading: str,
    beside: int,
) -> None:
    """Four heads of 32 dimensions have pages of 16 tokens of 56 bytes, and bounds or codes.

    The tokens of steps that read two pages are those of transformers.
    """
    with start(weights, f"k8v4+{reading}", **OPTIONS) as engine:
        found = block_bytes(engine)
        assert engine.llm_engine.vllm_config.cache_config.num_gpu_blocks == (1 << 20) // found
        answers = greedy(engine, prompts, COUNT)
    assert found == 4 * (16 * 56 + beside)
    assert answers == by_transformers(weights, f"k8v4+{reading}", prompts, COUNT)


def test_requests_that_are_preempted_give_the_same_tokens(
    start: Start, weights: str, prompts: list[list[int]], greedy: Greedy
) -> None:
    """With memory for little more than one, and all pages read, as a prompt reads them."""
    few = OPTIONS | {"kv_cache_memory_bytes": 20 * 4 * (16 * 256 + 128)}
    with start(weights, f"raw+{ALL}", disable_log_stats=False, **few) as engine:
        found = greedy(engine, prompts, 60)
        (count,) = (m for m in engine.get_metrics() if m.name == "vllm:num_preemptions")
        assert count.value > 0
        pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert found == by_transformers(weights, "raw", prompts, 60)


def block_bytes(engine: Any) -> int:
    """Return the bytes of a block over all layers."""
    groups = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    (spec,) = (group.kv_cache_spec for group in groups)
    return int(spec.block.block_bytes)
