"""Two workers, each with one of the model's two KV heads, and two engines, each with all."""

import asyncio
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
POLICY = (
    "snapkv:budget=24,window=8+k8v4"  # heads are independent, so they may be on different workers
)


def test_two_workers_give_the_tokens_of_one_and_have_twice_the_room(
    start: Start,
    greedy: Greedy,
    weights: str,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # vLLM would bind each worker to a NUMA node, but there may be only one.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = {
        "tensor_parallel_size": 2,
        "kv_cache_memory_bytes": 1 << 20,  # per worker
        "max_model_len": 256,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "poison": True,
    }
    with start(weights, POLICY, **options) as engine:
        # Other tests check that one worker generates these.
        assert greedy(engine, prompts, COUNT) == by_transformers(weights, POLICY, prompts, COUNT)
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        # Two layers of one head; a token takes 56 bytes, plus 8 for score and position.
        assert pool.num_gpu_blocks == (1 << 20) // (2 * 16 * 64)


@pytest.mark.parametrize("policy", [POLICY, pytest.param("k8v4", marks=pytest.mark.slow)])
def test_two_engines_side_by_side_both_give_the_tokens_of_one(
    weights: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    settings = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    given = AsyncEngineArgs(
        weights,
        data_parallel_size=2,
        kv_cache_memory_bytes=1 << 20,
        max_model_len=256,
        max_num_batched_tokens=512,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        additional_config={"kv_policy": policy},
    )

    async def told() -> list[list[int]]:
        engines = AsyncLLM.from_engine_args(given)

        async def answer(name: str, prompt: list[int], rank: int) -> list[int]:
            asked = {"prompt_token_ids": prompt}
            async for each in engines.generate(asked, settings, name, data_parallel_rank=rank):
                found = list(each.outputs[0].token_ids)
            return found

        both = [(prompt, rank) for rank in range(2) for prompt in prompts]
        try:
            return await asyncio.gather(*(answer(str(i), *each) for i, each in enumerate(both)))
        finally:
            engines.shutdown()

    assert asyncio.run(told()) == 2 * by_transformers(weights, policy, prompts, COUNT)


def test_heads_that_take_different_room_are_refused_on_workers_of_their_own(
    weights: str, statistics: str
) -> None:
    from dataclasses import replace

    from vllm import EngineArgs

    from kv_policy import CacheShape, parse
    from kv_serve.vllm.config import UnservableError
    from kv_serve.vllm.storage import stored

    options = {"tensor_parallel_size": 2, "skip_tokenizer_init": True, "dtype": "float32"}
    config = EngineArgs(model=weights, **options).create_engine_config()
    whole = CacheShape(layers=2, kv_heads=2, group=2, key_dim=32, value_dim=32)
    policy = parse(f"zack:file={statistics},rate=0.4")
    with pytest.raises(
        UnservableError, match="cannot be served with tensor parallelism: its heads"
    ):
        stored(config, policy, replace(whole, kv_heads=1))
    config.parallel_config.tensor_parallel_size = 1
    stored(config, policy, whole)
