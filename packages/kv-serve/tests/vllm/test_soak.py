"""After requests that wait, are preempted and are aborted, all of an engine's memory is free."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm import LLM

BLOCK = 32
HELD = 16  # blocks of 32 tokens under k8v4, enough for two of the longest requests
TOKEN_BYTES = 2 * 2 * (32 + 16 + 8)  # two layers of two heads with 32 dimensions


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., AbstractContextManager["LLM"]], tiny: Callable[..., str]
) -> Iterator["LLM"]:
    options = {
        "kv_cache_memory_bytes": HELD * BLOCK * TOKEN_BYTES,
        "block_size": BLOCK,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
    }
    with start(tiny(), "k8v4", **options) as running:
        yield running


def test_nothing_leaks_and_all_is_answered_though_requests_are_preempted_and_given_up(
    engine: "LLM",
) -> None:
    from benchmarks._vllm_soak import Soak, Soaking

    soak = Soak(requests=60, together=12, prompt=(1, 120), answer=(1, 100), aborted=0.3)
    found = Soaking(engine.llm_engine, soak, list(range(3, 256))).run()
    assert (found.requests, found.leaked_blocks, found.unanswered) == (60, 0, 0)
    assert found.answered + found.aborted == 60
    assert found.aborted > 5
    assert found.preemptions > 5


def test_an_engine_that_goes_on_with_nothing_is_noticed(
    engine: "LLM", monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import _vllm_soak
    from benchmarks._vllm_soak import Soak, Soaking

    monkeypatch.setattr(_vllm_soak, "STUCK", 5)
    soaking = Soaking(engine.llm_engine, Soak(requests=2, prompt=(1, 40)), list(range(3, 256)))
    monkeypatch.setattr(engine.llm_engine, "step", list)  # an empty step
    with pytest.raises(_vllm_soak.StuckError, match="nothing went on for 5 steps; 0 requests run"):
        soaking.run()
