"""A few queries of a sequence over pages, such as a draft that is checked: a decode step of more.

Every query sees every stored token, so the queries of a sequence may stand beside each other as
those of a group do.
"""

from dataclasses import replace
from typing import Final

import torch

from kv_attention import AttentionInputs, Partial
from kv_cpu.arguments import MOST_GROUP, parts, refused
from kv_cpu.library import chosen

MOST: Final = 8  # queries of a sequence; torch decodes a block of tokens once for any number


def multi_query_decode(inputs: AttentionInputs, isa: str | None = None) -> Partial | None:
    """Attend to all pages; None if the queries are too many, or native code does not take them.

    Rows of padding queries hold anything.

    Raises:
        RuntimeError: a table names a page that its pool does not have, or a length is impossible.
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
        isa or chosen(),
    )
    return Partial(out.view(*q.shape[:-1], inputs.value_dim), lse.view(q.shape[:-1]))
