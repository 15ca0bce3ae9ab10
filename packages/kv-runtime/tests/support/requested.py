"""Requests whose vectors are drawn beforehand: steps of a batch, and what each sees alone."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kv_policy import KVPolicy
from kv_runtime import PolicyCache, RequestBatch, RequestRows, RequestStep
from tiered_policies import SHAPE

SCALE, CHUNK = 0.4, 7
HEADS = SHAPE.kv_heads * SHAPE.group
PROMPTS = {"a": 19, "b": 6, "c": 11}  # "a" takes three steps, "c" two


def drawn(draw: torch.Generator, tokens: int) -> dict[str, list[Tensor]]:
    """Draw the queries, keys and values of each request's tokens, [layers, tokens, heads, dim]."""
    sizes = (HEADS, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.key_dim)
    sizes = (*sizes, (SHAPE.kv_heads, SHAPE.value_dim))
    return {
        name: [torch.randn(SHAPE.layers, tokens, *size, generator=draw) for size in sizes]
        for name in PROMPTS
    }


def stepped(
    batch: RequestBatch,
    steps: Mapping[int, RequestStep],
    brought: Sequence[Sequence[Tensor]],
    gone: Sequence[str],
    readers: int,
) -> list[Tensor]:
    """Do a step; what the tokens of each request see, by layer and by reader of a layer."""
    counts = [each.tokens for each in steps.values()]
    start = [sum(counts[:i]) for i in range(len(counts) + 1)]
    batch.begin(steps, gone)
    rows, outs = RequestRows(tuple(steps), tuple(start)), []
    for layer in range(SHAPE.layers):
        given = [torch.cat([x[i][layer] for x in brought]) for i in range(3)]
        for left in range(readers, -1, -1):
            outs.append(torch.full((start[-1], HEADS, SHAPE.value_dim), torch.nan))
            batch.attend(layer, rows, *given, outs[-1], more=left > 0)
    batch.end()
    return list(torch.stack(outs).split(counts, 1))


def seen_alone(
    policy: KVPolicy, tokens: Sequence[Tensor], prompt: int, readers: int, backend: str = "torch"
) -> Iterator[Tensor]:
    """What the tokens of a request see, step by step, in a cache that it has for itself."""
    cache, done = PolicyCache(policy, SHAPE, backend=backend), 0
    while True:
        count = min(CHUNK, prompt - done) if done < prompt else 1
        valid = torch.ones(1, count, dtype=torch.bool)
        cache.begin(valid, prompt=done < prompt, remaining=max(0, prompt - done - count))
        outs = []
        for layer in range(SHAPE.layers):
            q, k, v = (x[layer, done : done + count][None] for x in tokens)
            grouped = q.unflatten(2, (SHAPE.kv_heads, -1)).permute(0, 2, 3, 1, 4)
            fresh = k.transpose(1, 2), v.transpose(1, 2)
            for left in range(readers, -1, -1):
                out = cache.attend(layer, grouped, *fresh, SCALE, more=left > 0)
                outs.append(out.permute(0, 3, 1, 2, 4).flatten(2, 3)[0])
        yield torch.stack(outs)
        done += count
