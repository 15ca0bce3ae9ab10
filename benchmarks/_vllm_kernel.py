"""vLLM's own CPU attention over its own paged cache, called as its backend calls it."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

BLOCK = 128  # tokens, vLLM's default on a CPU


def decode(query: Tensor, key: Tensor, value: Tensor, cache_dtype: str) -> Callable[[], Tensor]:
    """Fill vLLM's cache in random block order, and give a decode step over it.

    Args:
        query: [B, H, G, D] in bfloat16.
        key: [B, H, L, D], L a multiple of 128.
        value: the same.
        cache_dtype: vLLM's name of the cache's dtype, `auto` for that of the queries.
    """
    step = prefill(query[:, :, :, None], key, value, cache_dtype)
    return lambda: step().view(query.shape)


def prefill(query: Tensor, key: Tensor, value: Tensor, cache_dtype: str) -> Callable[[], Tensor]:
    """Fill vLLM's cache in random block order, and give a pass of the last tokens over it.

    Args:
        query: [B, H, G, Q, D] in bfloat16, of the last Q of the L tokens; each sees those up to it.
        key: [B, H, L, D], L a multiple of 128.
        value: the same.
        cache_dtype: vLLM's name of the cache's dtype, `auto` for that of the queries.

    Returns:
        What gives the output [B * Q, H * G, D] in bfloat16.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    sequences, heads, tokens, dim = key.shape
    columns = tokens // BLOCK
    isa = _get_attn_isa(query.dtype, BLOCK, dim, cache_dtype)
    table = torch.randperm(sequences * columns, dtype=torch.int32).view(sequences, columns)
    wide = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
    blocks = torch.zeros(sequences * columns, heads, 2 * BLOCK, dim, dtype=wide)
    keys, values = blocks.chunk(2, dim=2)
    for b in range(sequences):
        slot = (table[b, :, None].long() * BLOCK + torch.arange(BLOCK)).flatten()
        rows = (x[b].transpose(0, 1).contiguous() for x in (key, value))
        ops.cpu_attn_reshape_and_cache(*rows, keys, values, slot, isa, kv_cache_dtype=cache_dtype)
    flat = query.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1).contiguous()
    out = torch.empty_like(flat)
    start = torch.arange(sequences + 1, dtype=torch.int32) * query.shape[3]
    length = torch.full((sequences,), tokens, dtype=torch.int32)

    @cache
    def schedule(threads: int) -> Tensor:
        """Made once for all layers of a step, so its time does not count."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=sequences,
            num_heads=flat.shape[1],
            num_kv_heads=heads,
            head_dim=dim,
            seq_lens=length,
            dtype=query.dtype,
            query_start_loc=start,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
            kv_cache_dtype=cache_dtype,
        )

    def step() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            query=flat,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=start,
            seq_lens=length,
            scale=dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=schedule(torch.get_num_threads()),
            s_aux=None,
            kv_cache_dtype=cache_dtype,
        )
        return out

    return step
