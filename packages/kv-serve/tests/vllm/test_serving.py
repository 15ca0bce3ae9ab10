"""A real model under k8v4: single requests, batches, and after a cached prefix."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from kv_eval.tasks import default_text, found, needle

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.model
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
Patterns = list[tuple[list[int], list[int]]]
BLOCK = 128  # tokens, vLLM's default on a CPU


@pytest.fixture(scope="module")
def engine(start: Callable[..., AbstractContextManager["LLM"]], smollm2: str) -> Iterator["LLM"]:
    with start(smollm2, "k8v4", kv_cache_memory_bytes=1 << 28, max_model_len=4096) as running:
        yield running


@pytest.mark.slow
def test_needles_in_2048_tokens_are_all_found(engine: "LLM", greedy: Greedy) -> None:
    tokenizer = engine.get_tokenizer()
    # Seed 0 hides a number that begins like 2**31, which the model has memorized.
    hidden = {"samples": 10, "setting": "aware", "seed": 1}
    samples = needle(tokenizer, default_text(), length=2048, **hidden)
    answers = greedy(engine, [[*s.prompt_ids, *s.question_ids] for s in samples], 24)
    texts = tokenizer.batch_decode(answers)
    assert [found(t, s.answers[0]) for t, s in zip(texts, samples, strict=True)] == [True] * 10


def test_a_request_alone_goes_on_as_it_must(
    engine: "LLM", greedy: Greedy, patterns: Patterns
) -> None:
    engine.reset_prefix_cache()
    prompt, continuation = patterns[-1]
    assert greedy(engine, [prompt], 24) == [continuation]


def test_requests_together_go_on_as_each_alone(
    engine: "LLM", greedy: Greedy, patterns: Patterns
) -> None:
    engine.reset_prefix_cache()
    assert greedy(engine, [prompt for prompt, _ in patterns], 24) == [more for _, more in patterns]


def test_a_request_goes_on_after_a_cached_prefix(engine: "LLM", patterns: Patterns) -> None:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    settings = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt, _ in patterns]
    engine.generate(asked, settings, use_tqdm=False)
    again = engine.generate(asked, settings, use_tqdm=False)
    cached = [len(prompt) // BLOCK * BLOCK for prompt, _ in patterns]
    assert [answer.num_cached_tokens for answer in again] == cached
    assert [list(a.outputs[0].token_ids) for a in again] == [more for _, more in patterns]
