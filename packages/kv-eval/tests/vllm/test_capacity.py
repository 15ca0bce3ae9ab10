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
    from vllm.config import CacheConfig

Start = Callable[..., AbstractContextManager["LLM"]]
CELLS, BLOCK = 2 * 2, 32  # layers and heads of a tiny model, whose heads have 32 dimensions
STOCK = 128  # bytes of a bfloat16 key and value
SIZES = {"k8v8": 32 + 32 + 8, "k8v4": 32 + 16 + 8, "k4v2": 16 + 8 + 8}
# As many bytes as whole blocks of all fill, so that nothing is rounded.
WHOLE = CELLS * BLOCK * math.lcm(STOCK, *SIZES.values())


def stated(start: Start, model: str, policy: str | None, **options: object) -> "CacheConfig":
    """What vLLM knows of its cache once an engine has started."""
    named = {"load_format": "dummy", "skip_tokenizer_init": True, **options}
    with start(model, policy, **named) as engine:
        return engine.llm_engine.vllm_config.cache_config


def test_capacity_is_in_the_ratio_of_bytes_per_token(
    start: Start, tiny: Callable[..., str]
) -> None:
    options = {"kv_cache_memory_bytes": WHOLE, "block_size": BLOCK, "max_model_len": 256}
    model = tiny()
    stock = stated(start, model, None, **options).kv_cache_size_tokens
    assert stock == WHOLE // (CELLS * STOCK)
    for policy, token_bytes in SIZES.items():
        ours = stated(start, model, policy, **options)
        assert Fraction(ours.kv_cache_size_tokens, stock) == Fraction(STOCK, token_bytes)
        assert ours.kv_cache_size_tokens == WHOLE // (CELLS * token_bytes)
        assert ours.kv_cache_max_concurrency == ours.kv_cache_size_tokens / 256


def test_capacity_is_rounded_down_to_whole_blocks(start: Start, tiny: Callable[..., str]) -> None:
    given, block = 500_000, 48  # a size that the stock attention does not take
    options = {"kv_cache_memory_bytes": given, "block_size": block, "max_model_len": 500}
    found = stated(start, tiny(), "k8v4", **options)
    blocks = given // (CELLS * block * 56)
    assert found.kv_cache_max_concurrency == blocks / 11  # which hold 528 tokens
    assert found.kv_cache_size_tokens == int(blocks / 11 * 500)


def test_capacity_as_a_function_starts_an_engine_of_its_own(weights: str) -> None:
    from kv_eval.vllm.capacity import token_capacity

    found = token_capacity(weights, "k8v4", 1 << 22, max_model_len=512)
    assert found == (1 << 22) // (CELLS * 128 * 56) * 128


def test_capacity_of_what_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_eval.vllm.capacity import token_capacity

    (tmp_path / "vllm.py").write_text("raise ImportError('this vLLM is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)did not start with .*this vLLM is broken"):
        token_capacity(tmp_path, "k8v4", 1 << 22)
