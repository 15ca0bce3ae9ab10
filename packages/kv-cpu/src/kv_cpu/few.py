"""A few queries per sequence over pages, such as draft tokens to verify: a wider decode step.

Every query sees every stored token, so the queries of a sequence are processed like those of a GQA
group.
"""

from dataclasses import replace
from typing import Final

import torch

from kv_attention import AttentionInputs, Partial
from kv_cpu.arguments import MOST_GROUP, parts, refused, softmax
from kv_cpu.library import chosen

MOST: Final = 8  # queries of a sequence; torch decodes a block once for any number of queries


def multi_query_decode(inputs: AttentionInputs, isa: str | None = None) -> Partial | None:
    """Compute attention over all pages; None for too many queries, or an unsupported pass.

    Rows of padding queries are undefined. Sinks are left to the caller, which merges other tokens.

    Raises:
        RuntimeError: a table names a page outside its pool, or a length is out of range.
    """
    q = inputs.q
    if not inputs.pages or q.shape[3] > MOST or q.shape[2] * q.shape[3] > MOST_GROUP:
        return None
    pages = replace(inputs, dense=())
    if refused(pages) is not None:
        return None
    out, lse = torch.ops.kv_cpu.decode(
        q.flatten(2, 3)[:, :, :, None],
        inputs.position.amax(dim=1, keepdim=True).long(),
        *parts(pages, watched=False),
        [],
        [],
        inputs.value_dim,
        inputs.scale,
        *softmax(inputs, sinks=False),
        isa or chosen(),
    )
    return Partial(out.view(*q.shape[:-1], inputs.value_dim), lse.view(q.shape[:-1]))
