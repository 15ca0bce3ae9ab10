"""Chunked prefill under a policy that compresses prompts at their end."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from vllm_models import NEEDS_TOKENIZER

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
Patterns = list[tuple[list[int], list[int]]]


@pytest.mark.model
def test_prompts_in_chunks_the_last_of_one_token_go_on_as_they_must(
    start: Start,
    smollm2: str,
    greedy: Greedy,
    patterns: Patterns,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import SamplingParams

    from kv_serve.vllm import storage

    said: list[str] = []
    monkeypatch.setattr(storage.logger, "info", lambda text, *more: said.append(text % more))
    options = {
        "kv_cache_memory_bytes": 1 << 26,
        "max_model_len": 1024,
        "max_num_batched_tokens": 160,
        "block_size": 32,
        "enable_prefix_caching": True,
    }
    with start(smollm2, "kv-compress:rate=2+k8v4", poison=True, **options) as engine:
        wanted = [more for _, more in patterns]
        asked = [prompt for prompt, _ in patterns]
        assert greedy(engine, asked, 24) == wanted
        prompt, more = patterns[-1]
        assert greedy(engine, [prompt[-481:]], 24) == [more]
        settings = SamplingParams(temperature=0, max_tokens=1)
        again = engine.generate({"prompt_token_ids": prompt}, settings, use_tqdm=False)
        assert again[0].num_cached_tokens == 0  # it names no boundary
        pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert any("no prefix is found by its blocks" in each for each in said)


@pytest.mark.model
@NEEDS_TOKENIZER
def test_a_threshold_frees_blocks_after_every_chunk(
    start: Start, smollm2: str, patterns: Patterns
) -> None:
    from vllm import SamplingParams

    options = {
        "kv_cache_memory_bytes": 1 << 26,
        "max_model_len": 1024,
        "max_num_batched_tokens": 96,
        "block_size": 32,
    }
    prompt = patterns[-1][0]
    policy = "gate:file=smollm2-135m,share=0.2,recent=16+k8v4"
    with start(smollm2, policy, poison=True, **options) as engine:
        llm = engine.llm_engine
        managers = llm.engine_core.engine_core.scheduler.kv_cache_manager.coordinator
        (manager,) = managers.single_type_managers
        settings = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.add_request("one", {"prompt_token_ids": prompt}, settings)
        held = []
        while llm.has_unfinished_requests():
            llm.step()
            held += [len(owned.blocks) for owned in manager._owned.values()]
    # Six chunks; a policy with a budget would own the blocks of the whole prompt before it ends.
    assert len(prompt) > 5 * 96
    assert 0 < max(held) < 0.7 * manager.blocks_for(len(prompt))
