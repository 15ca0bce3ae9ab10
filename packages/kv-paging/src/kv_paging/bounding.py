"""Bounds of keys by channel: their largest and smallest numbers, rounded outwards.

Where pages are ranked by codes of their keys, these are in the place of bounds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import BFloat16, Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging.key_codes import codes_of
from kv_paging.table import PageTable, spread
from kv_paging.tokens import Stored
from kv_policy import PagedTokens, PageLayout
from kv_policy.pages import ALIGNED

DTYPE: Final = torch.bfloat16  # 2 bytes for the range of float32
READ: Final = 1 << 21  # numbers of keys that are decoded together


def bound_decoded(
    reader: Callable[..., Stored],
    pages: PagedTokens,
    count: Int[Tensor, " S"],
    both: BFloat16[Tensor, "*T _"] | UInt8[Tensor, "*T _"],
) -> None:
    """Do what `PageKernels.bound` does, with keys that some kernels decode, some at a time.

    Synchronizes with the device.
    """
    tokens, table = pages.layout.tokens, PageTable.over(pages)
    missing = (pages.length.flatten().long() // tokens - count).clamp(min=0)
    total = int(missing.sum())
    if not total:
        return
    row, column = spread(count, missing, total)
    size = max(1, READ // (tokens * pages.layout.format.key.dim))
    for rows, columns in zip(row.split(size), column.split(size), strict=True):
        page = table.lookup(rows, columns)[:, None, None]
        alone = torch.arange(len(rows), device=row.device)
        length = pages.length.new_full((len(rows), 1), tokens)
        each = replace(pages, table=page, length=length, reverse=False, longest=tokens)
        found = reader(each, alone, tokens, frozenset({"keys"}))
        assert found.key is not None, "requested"
        coded = both.dtype == torch.uint8
        mine = codes_of(found.key, found.held) if coded else bounds_of(found.key, found.held)
        if both.ndim == 2:  # the same for all rows that hold a page
            both[page.flatten().long()] = mine
        else:
            both[rows, columns] = mine


def bounds_in(
    data: UInt8[Tensor, "P nbytes"], layout: PageLayout
) -> BFloat16[Tensor, "P _"] | UInt8[Tensor, "P _"]:
    """Return the bounds in pages as numbers, or the codes of their keys, in place.

    Raises:
        ValueError: pages of this layout have none, or their addresses are not aligned.
    """
    if not layout.bounds:
        raise ValueError("pages of this layout have no bounds; use a layout with bounds=True")
    if (data.storage_offset() | data.stride(0)) % ALIGNED:
        raise ValueError(
            f"pages are {data.stride(0)} bytes apart, from byte {data.storage_offset()} of their "
            f"memory on; both must be multiples of {ALIGNED} where pages have bounds"
        )
    first = layout.bound_offset
    found = data[:, first : first + layout.bound_bytes]
    return found if layout.coded else found.view(DTYPE)


def bounds_of(key: Float[Tensor, "S L D"], held: Bool[Tensor, "S L"]) -> BFloat16[Tensor, "S _"]:
    """Return the largest numbers of the keys of each row, then the smallest, rounded outwards.

    Those of a row without a key are below every query's other bounds.
    """
    gone, most = ~held[..., None], torch.finfo(key.dtype).max  # infinity times 0 is not a number
    high = key.masked_fill(gone, -most).amax(1)
    low = key.masked_fill(gone, most).amin(1)
    return torch.cat((_upwards(high), -_upwards(-low)), 1)


def _upwards(x: Float[Tensor, "*S"]) -> BFloat16[Tensor, "*S"]:
    """Round to the next larger number that has 2 bytes."""
    near = x.to(DTYPE)
    infinity = torch.full_like(near, torch.inf)
    return torch.where(near.to(x.dtype) < x, torch.nextafter(near, infinity), near)
