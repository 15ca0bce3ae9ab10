"""After the deepest sleep, an engine answers as before: nothing of a policy is lost."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from sleeping import Sleeper

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
COUNT = 12
OPTIONS = {
    "kv_cache_memory_bytes": 1 << 20,
    "max_model_len": 256,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}


@pytest.mark.parametrize(
    "text", ["hadamard:file={},pair=true+k4v4", "kv-compress:rate=2,floor=8+k8v4"]
)
def test_it_answers_as_before(
    start: Start, weights: str, statistics: str, prompts: list[list[int]], greedy: Greedy, text: str
) -> None:
    sleeper = Sleeper()
    with sleeper.recording(), start(weights, text.format(statistics), **OPTIONS) as engine:
        before = greedy(engine, prompts, COUNT)
        sleeper.sleep_and_wake(engine)
        assert greedy(engine, prompts, COUNT) == before
