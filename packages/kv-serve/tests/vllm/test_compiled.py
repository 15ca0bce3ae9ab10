"""Models that vLLM compiles, which is its default; attention is outside the traced graph."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from transformed import by_transformers

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
COUNT = 24


@pytest.fixture
def compiler(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enable compilation in vLLM: with Inductor, the default, or running the traced graph only."""
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    if request.param == "traced":  # as vLLM's own tests on a CPU
        monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
        return
    monkeypatch.delenv("VLLM_CPU_CI_ENV", raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


POLICIES = ["k8v4", "snapkv:budget=24,window=8+k8v4", "kv-compress:budget=24,window=8+k8v4"]
CASES = [
    ("traced", POLICIES[0]),
    pytest.param("traced", POLICIES[1], marks=pytest.mark.slow),
    ("traced", POLICIES[2]),
    # The graph is the same, and Inductor's compiler of C++ takes longer than all other engines.
    *(pytest.param("inductor", policy, marks=pytest.mark.slow) for policy in POLICIES),
]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("compiler", "policy"), CASES, indirect=["compiler"])
def test_a_compiled_model_gives_the_tokens_of_an_eager_one(
    start: Start,
    greedy: Greedy,
    weights: str,
    prompts: list[list[int]],
    policy: str,
) -> None:
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    options = {
        "enforce_eager": False,
        "kv_cache_memory_bytes": 1 << 20,
        "max_model_len": 256,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "poison": True,
    }
    with torch._dynamo.config.patch(disable=False), start(weights, policy, **options) as engine:
        # Other tests check that eager engines generate these.
        assert greedy(engine, prompts, COUNT) == by_transformers(weights, policy, prompts, COUNT)
    assert counters["stats"]["unique_graphs"]
