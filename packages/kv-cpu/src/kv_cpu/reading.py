"""The pages that a decode step reads, selected in native code by bounds or codes of their keys."""

from dataclasses import replace
from functools import lru_cache
from typing import Final

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn.functional import pad

from kv_attention import PageBounds
from kv_cpu.arguments import MOST_DIM, MOST_GROUP
from kv_cpu.library import chosen
from kv_policy import PagedTokens, PageReading
from kv_policy.described import NUMBERS
from kv_policy.key_codes import code_rotation

LANES: Final = 16


def select_pages(
    q: Float[Tensor, "B H G D"],
    pages: PagedTokens,
    bounds: PageBounds,
    reading: PageReading,
    isa: str | None = None,
) -> PagedTokens | None:
    """Select as `kv_attention.select_pages`; None if `declined` returns a reason.

    Raises:
        RuntimeError: the arguments do not match.
        OSError: the library cannot be loaded.
        ValueError: the environment names an instruction set that is unavailable here.
    """
    if declined(q, bounds) is not None:
        return None
    tokens, length = pages.layout.tokens, pages.length.contiguous()
    found = torch.ops.kv_cpu.page_select(
        q,
        bounds.both,
        _rotation(q.shape[3]) if bounds.coded else q.new_empty(0),
        bounds.count.contiguous(),
        pages.table.contiguous(),
        length,
        reading.share or 0.0,
        reading.most_pages(tokens),
        tokens,
        reading.first,
        reading.last,
        pages.reverse,
        isa or chosen(),
    )
    if not found:
        return pages
    table, read = found
    longest = table.shape[2] * tokens
    return replace(pages, table=table, length=read, reverse=False, longest=longest, tiles=None)


def declined(q: Float[Tensor, "B H G D"], bounds: PageBounds) -> str | None:
    """Return why torch selects the pages instead of native code; None if native code does."""
    if not q.is_cpu:
        return f"tensors on {q.device.type}"
    if q.dtype not in NUMBERS or bounds.both.dtype not in (torch.bfloat16, torch.uint8):
        return f"queries in {q.dtype}, bounds in {bounds.both.dtype}"
    if not 0 < q.shape[2] <= MOST_GROUP or q.shape[3] > MOST_DIM // 2:
        return f"more than {MOST_GROUP} queries of a KV head, or {MOST_DIM // 2} dimensions"
    if q.stride(3) != 1 and q.shape[3] != 1:
        return "vectors whose numbers are not consecutive"
    return None


@lru_cache(maxsize=16)
def _rotation(dim: int) -> Float32[Tensor, "D _"]:
    """Return the rotation of codes, with rows that are padded to whole registers."""
    return pad(code_rotation(dim, torch.device("cpu")), (0, -dim % LANES)).contiguous()
