"""The tokens match transformers under the same policy, and vLLM reports the right capacity."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest
import torch

from transformed import by_transformers

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
MEMORY, LONGEST, COUNT = 1 << 20, 256, 24
COMPRESS = "kv-compress:rate=4,floor=16"
# The page that is appended to and another, of up to ten.
READS = "quest:budget=32,sinks=0,recent=0,whole=0"
POLICIES = (
    f"{COMPRESS}+k8v4",
    "snapkv:budget=24,window=8+k8v4",
    "expected-attention:budget=24",
    "r-kv:budget=24,window=8,every=5",
    "d2o:budget=24,every=5+k8v4",
    "leankv",
    "k4v4:keys=channel,block=16,window=16",
    "zack:file={},rate=0.4",
    "zack:file={},rate=0.4+" + COMPRESS + "+k8v4",
    f"k8v4+{READS}",
    f"{COMPRESS}+k8v4+{READS}",
)
# A block of 16 tokens takes 16 * 64 bytes of four heads, so there are 256; a request keeps 64
# tokens a head, or 24, which take two pages.
BY_HAND = {POLICIES[0]: 256 / 4, POLICIES[1]: 256 / 2}


def expected_concurrency(policy_text: str, blocks: int) -> float:
    """Return how many requests of the longest length fit, by their kept pages."""
    from kv_policy import CacheShape, parse
    from kv_runtime import kept_tokens
    from paged_engine import account_of

    shape = CacheShape(2, 2, 2, 32, 32, torch.float32)
    policy = parse(policy_text)
    account = account_of(policy, shape, 32 if policy_text.startswith("leankv") else 16)
    kept = kept_tokens(policy, LONGEST, account.token_bytes)
    each = account.blocks(account.pages(kept))
    return blocks / each


@pytest.fixture(scope="module", params=POLICIES)
def served(
    request: pytest.FixtureRequest, start: Start, weights: str, statistics: str
) -> Iterator[tuple["LLM", str]]:
    policy = request.param.format(statistics)
    options = {
        "kv_cache_memory_bytes": MEMORY,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "poison": True,
    }
    with start(weights, policy, **options) as running:
        yield running, policy


def test_tokens_are_those_of_transformers(
    served: tuple["LLM", str], weights: str, prompts: list[list[int]], greedy: Greedy
) -> None:
    engine, policy = served
    wanted = by_transformers(weights, policy, prompts, COUNT)
    assert [greedy(engine, [prompt], COUNT)[0] for prompt in prompts] == wanted
    assert greedy(engine, prompts, COUNT) == wanted  # in one batch, and with prefixes seen before


def test_capacity_is_what_the_pages_of_the_longest_request_make_it(
    served: tuple["LLM", str],
) -> None:
    engine, policy = served
    cache = engine.llm_engine.vllm_config.cache_config
    requests = expected_concurrency(policy, cache.num_gpu_blocks)
    assert cache.kv_cache_max_concurrency == requests
    assert cache.kv_cache_size_tokens == int(requests * LONGEST)
    assert requests == BY_HAND.get(policy, requests)
