"""What vLLM itself says it can hold is what the bytes of a token make it."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
LAYERS, HEADS, BLOCK = 30, 3, 32  # of SmolLM2-135M, whose heads have 64 dimensions
STOCK = 256  # bytes of a bfloat16 key and value


def tokens(start: Start, model: str, policy: str | None, **options: object) -> int:
    with start(model, policy, load_format="dummy", **options) as engine:
        return engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens


@pytest.mark.model
@pytest.mark.parametrize(
    ("policy", "token_bytes"), [("k8v8", 64 + 64 + 8), ("k8v4", 64 + 32 + 8), ("k4v2", 32 + 16 + 8)]
)
def test_capacity_is_in_the_ratio_of_bytes_per_token(
    start: Start, smollm2: str, policy: str, token_bytes: int
) -> None:
    # As many bytes as whole blocks of both fill, so that nothing is rounded.
    both = LAYERS * HEADS * BLOCK * math.lcm(STOCK, token_bytes)
    options = {
        "kv_cache_memory_bytes": both * -(-(1 << 25) // both),
        "block_size": BLOCK,
        "max_model_len": 256,
    }
    stock, ours = (tokens(start, smollm2, named, **options) for named in (None, policy))
    assert Fraction(ours, stock) == Fraction(STOCK, token_bytes)
    assert ours == options["kv_cache_memory_bytes"] // (LAYERS * HEADS * token_bytes)


@pytest.mark.model
def test_capacity_is_rounded_down_to_whole_blocks(start: Start, smollm2: str) -> None:
    given, block = 50_000_000, 48  # a size that the stock attention does not take
    options = {"kv_cache_memory_bytes": given, "block_size": block, "max_model_len": 480}
    found = tokens(start, smollm2, "k8v4", **options)
    assert found == given // (LAYERS * HEADS * block * 104) * block


@pytest.mark.model
def test_capacity_as_a_function_starts_an_engine_of_its_own(smollm2: str) -> None:
    from kv_serve.vllm.capacity import token_capacity

    found = token_capacity(smollm2, "k8v4", 1 << 26, max_model_len=512)
    assert found == (1 << 26) // (LAYERS * HEADS * 128 * 104) * 128


def test_capacity_of_what_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_serve.vllm.capacity import token_capacity

    (tmp_path / "vllm.py").write_text("raise ImportError('this vLLM is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)did not start with .*this vLLM is broken"):
        token_capacity(tmp_path, "k8v4", 1 << 22)
