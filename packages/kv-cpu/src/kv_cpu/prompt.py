"""Prefill: many queries of a sequence over paged and dense tokens, for a prompt or a chunk.

Tokens are unpacked in blocks, each once for as many queries as fit in a core's cache, with an
online softmax (FlashAttention; Dao et al., 2022).
"""

import torch

from kv_attention import AttentionInputs, Partial
from kv_cpu.arguments import parts, refused
from kv_cpu.few import MOST
from kv_cpu.library import chosen


def attend_to_all(inputs: AttentionInputs, isa: str | None = None) -> Partial:
    """Compute attention over all parts; 0 and -inf for a query that is padding or sees no token.

    The output is in the dtype of the queries, the log-sum-exp in float32.

    Raises:
        RuntimeError: a table names a page outside its pool, or a length is out of range.
    """
    out, lse = torch.ops.kv_cpu.prompt(
        inputs.q,
        inputs.position.long().contiguous(),
        *parts(inputs, watched=False),
        inputs.value_dim,
        inputs.scale,
        isa or chosen(),
    )
    return Partial(out, lse)


def declined(inputs: AttentionInputs, isa: str | None = None) -> str | None:
    """Return why torch computes a pass of many queries; None if native code does."""
    queries = inputs.q.shape[3]
    if queries <= MOST:
        return f"{queries} queries of a sequence; native code supports {MOST} over pages alone"
    if (isa or chosen()) == "plain":
        return "native prefill needs AVX2 or more, and this is `plain`"
    return refused(inputs)
