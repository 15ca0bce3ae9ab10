"""A rotation before the codec keeps tokens in vLLM's slots, whose prefixes are shared."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from transformed import by_transformers

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
POLICIES = (
    "hadamard+k8v4",
    "hadamard+k4v3:levels=normal",
    "hadamard:file={},pair=true+k4v4",
    "channel-scale:file={},keys=true+k4v4:outliers=1",
)
COUNT, BLOCK = 24, 16


@pytest.fixture(scope="module", params=POLICIES)
def served(
    request: pytest.FixtureRequest, start: Start, weights: str, statistics: str
) -> Iterator[tuple["LLM", str]]:
    policy = request.param.format(statistics)
    options = {
        "kv_cache_memory_bytes": 1 << 20,
        "max_model_len": 256,
        "block_size": BLOCK,
        "dtype": "float32",
        "skip_tokenizer_init": True,
    }
    with start(weights, policy, **options) as running:
        yield running, policy


def test_tokens_are_those_of_transformers_and_prefixes_are_shared(
    served: tuple["LLM", str], weights: str, prompts: list[list[int]], greedy: Greedy
) -> None:
    from vllm import SamplingParams

    engine, policy = served
    assert engine.llm_engine.vllm_config.kv_transfer_config is None
    wanted = by_transformers(weights, policy, prompts, COUNT)
    assert greedy(engine, prompts, COUNT) == wanted
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    settings = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    again = engine.generate(asked, settings, use_tqdm=False)
    cached = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    assert [answer.num_cached_tokens for answer in again] == cached


def test_a_slot_is_as_large_as_without_the_rotation() -> None:
    from kv_policy import CacheShape, parse
    from kv_serve.vllm.config import is_plain, plain_format

    shape = CacheShape(2, 2, 2, 32, 32)
    policy = parse("hadamard+k4v4")
    assert is_plain(policy)
    assert plain_format(policy, shape) == plain_format(parse("k4v4"), shape)
    for text in ("hadamard+snapkv+k4v4", "hadamard+k4v4:window=8", "hadamard+leankv"):
        assert plain_format(parse(text), shape) is None


def test_a_basis_of_fewer_dimensions_is_stored_in_pages(statistics: str) -> None:
    from kv_policy import CacheShape, parse
    from kv_serve.vllm.config import is_plain, plain_format

    policy = parse(f"zack:file={statistics},rate=0.4+k8v4")
    assert not is_plain(policy)
    assert plain_format(policy, CacheShape(2, 2, 2, 32, 32)) is None
