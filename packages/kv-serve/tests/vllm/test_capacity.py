"""The capacity that vLLM reports follows from the bytes per token."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import CacheConfig

Start = Callable[..., AbstractContextManager["LLM"]]
CELLS, BLOCK = 2 * 2, 32  # layers and KV heads of a tiny model with head dimension 32
STOCK = 128  # bytes of a key and value in bfloat16
SIZES = {"k8v8": 32 + 32 + 8, "k8v4": 32 + 16 + 8, "k4v2": 16 + 8 + 8}
# A multiple of every block size, so that nothing is rounded.
WHOLE = CELLS * BLOCK * math.lcm(STOCK, *SIZES.values())


def stated(start: Start, model: str, policy: str | None, **options: object) -> "CacheConfig":
    """Return vLLM's cache configuration after an engine has started."""
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
    given, block = 500_000, 48  # a size that the stock attention does not support
    options = {"kv_cache_memory_bytes": given, "block_size": block, "max_model_len": 500}
    found = stated(start, tiny(), "k8v4", **options)
    blocks = given // (CELLS * block * 56)
    assert found.kv_cache_max_concurrency == blocks / 11  # which hold 528 tokens
    assert found.kv_cache_size_tokens == int(blocks / 11 * 500)
