"""A real model under policies that evict or project tokens: blocks return to vLLM's pool."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from vllm_models import NEEDS_TOKENIZER

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.model
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
Patterns = list[tuple[list[int], list[int]]]
Start = Callable[..., AbstractContextManager["LLM"]]
POLICIES = (
    "kv-compress:rate=2+k8v4",
    pytest.param("gate:file=smollm2-135m,budget=128,window=8+k8v4", marks=NEEDS_TOKENIZER),
    "leankv",
    "snapkv:budget=128+k8v4",
    "k4v4:keys=channel,block=32,window=32",
)
NEAR = 0.25  # to the largest logit, in bfloat16, in which those of 16 differ by 0.125


def free_blocks(engine: "LLM") -> tuple[int, int]:
    """Return the number of free blocks, and the number available to requests."""
    pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1


@pytest.fixture(
    scope="module",
    params=[*POLICIES[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in POLICIES[2:])],
)
def engine(request: pytest.FixtureRequest, start: Start, smollm2: str) -> Iterator["LLM"]:
    options = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 1024, "poison": True}
    with start(smollm2, request.param, **options) as running:
        yield running


def test_requests_go_on_as_they_must_and_leave_nothing(
    engine: "LLM", greedy: Greedy, patterns: Patterns
) -> None:
    free, every = free_blocks(engine)
    assert free == every
    assert greedy(engine, [prompt for prompt, _ in patterns], 24) == [more for _, more in patterns]
    assert free_blocks(engine) == (every, every)
    prompt, continuation = patterns[-1]
    assert greedy(engine, [prompt], 24) == [continuation]
    assert free_blocks(engine) == (every, every)


@pytest.mark.parametrize(
    "engine",
    [*POLICIES[:2], pytest.param(POLICIES[2], marks=pytest.mark.slow)],
    indirect=True,
)
def test_natural_text_goes_on_as_in_transformers(
    engine: "LLM", greedy: Greedy, smollm2: str
) -> None:
    import torch

    from kv_eval.tasks import default_text
    from transformed import logits_by_transformers

    policy = engine.llm_engine.vllm_config.additional_config["kv_policy"]
    ids = engine.get_tokenizer().encode(default_text().body)
    prompts = [ids[:300]]
    [logits] = logits_by_transformers(smollm2, policy, prompts, 16, torch.bfloat16)
    [found] = greedy(engine, prompts, 16)
    # After the first difference all others may differ.
    equal = (torch.tensor(found) == logits.argmax(-1)).long().cumprod(0).sum()
    for token, each in zip(found[: equal + 1], logits.float(), strict=False):
        assert each.max() - each[token] <= NEAR
