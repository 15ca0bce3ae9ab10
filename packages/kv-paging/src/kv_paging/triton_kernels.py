"""The page kernels in Triton, which write, move and read tokens in pages on a GPU.

Pages are bit-identical to those of `kv_paging.torch_kernels`, except for the payload of a NaN that
is stored unchanged. Nothing synchronizes with the device. Triton is imported at the first call.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import BFloat16, Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging import torch_kernels
from kv_paging.pool import PagePool
from kv_paging.tokens import Stored, VectorNames
from kv_paging.work import DecodeStep, Recoding, TokenWrite
from kv_policy import PagedTokens, PageLayout, Running
from kv_policy.described import NUMBERS, described
from kv_policy.interpreter import interpreted, missing

__all__ = [
    "accumulate",
    "bound",
    "compact",
    "copy_pages",
    "declined",
    "missing",
    "place",
    "read",
    "recode",
    "rescore",
    "step",
    "weakest",
    "write",
]

_MOST_DIM: Final = 1024  # a row of this size still fits into a tile


def declined(layout: PageLayout, device: torch.device) -> str | None:
    """Return why these kernels do not support pages of a layout; None if they do."""
    if device.type != "cuda" and not interpreted():
        return f"pages on {device.type}"
    if max(layout.format.key.dim, layout.format.value.dim) > _MOST_DIM:
        return f"vectors of more than {_MOST_DIM} dimensions"
    return described(layout).declined


def write(pages: PagedTokens, tokens: TokenWrite) -> None:
    """Encode tokens and write them; vectors in float64 are encoded by torch."""
    if _known(tokens.key, tokens.value):
        from kv_paging.gpu import writing

        writing.write(pages, tokens)
    else:
        torch_kernels.write(pages, tokens)


def recode(pages: PagedTokens, tokens: Recoding) -> None:
    """Decode stored tokens to tensors, and write these."""
    write(pages, torch_kernels.decoded(tokens, pages.layout, read))


def place(
    data: UInt8[Tensor, "P nbytes"],
    layout: PageLayout,
    page: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    key: Float[Tensor, "m H D"],
    value: Float[Tensor, "m H Dv"],
) -> None:
    """Encode tokens and write each to its row of its page; torch encodes those in float64."""
    if _known(key, value):
        from kv_paging.gpu import writing

        writing.place(data, layout, page, row, key, value)
    else:
        torch_kernels.place(data, layout, page, row, key, value)


def compact(pages: PagedTokens, table_rows: Int[Tensor, " S"], stay: Bool[Tensor, "S R"]) -> None:
    """Move kept tokens to the front."""
    from kv_paging.gpu import moving

    moving.compact(pages, table_rows, stay)


def copy_pages(
    data: UInt8[Tensor, "P nbytes"], source: Int[Tensor, " n"], target: Int[Tensor, " n"]
) -> None:
    """Copy whole pages."""
    from kv_paging.gpu import moving

    moving.copy_pages(data, source, target)


def read(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    slots: int,
    vectors: VectorNames,
    start: Int[Tensor, " S"] | None = None,
) -> Stored:
    """Read tokens."""
    from kv_paging.gpu import reading

    return reading.read(pages, table_rows, slots, vectors, start)


def rescore(pages: PagedTokens, table_rows: Int[Tensor, " S"], score: Float[Tensor, "S L"]) -> None:
    """Write new scores; pages past a table row's end are unchanged."""
    from kv_paging.gpu import reading

    reading.rescore(pages, table_rows, score)


def accumulate(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    before: Int[Tensor, " S"],
    mass: Float[Tensor, "S L"],
    seen: Int[Tensor, "S L"],
    running: Running,
    position: Int[Tensor, "S L"] | None = None,
) -> None:
    """Update scores."""
    from kv_paging.gpu import accumulating

    accumulating.accumulate(pages, table_rows, before, mass, seen, running, position)


def weakest(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    slots: int,
    until: Int[Tensor, " S"] | None,
) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
    """Find the lowest scores."""
    from kv_paging.gpu import reading

    return reading.weakest(pages, table_rows, slots, until)


def bound(
    pages: PagedTokens,
    count: Int[Tensor, " S"],
    both: BFloat16[Tensor, "*T _"] | UInt8[Tensor, "*T _"],
    most: int,
) -> None:
    """Bound keys, or encode them, in one launch."""
    from kv_paging.gpu import bounding, key_codes

    if both.dtype == torch.uint8:
        key_codes.encode(pages, count, both, most)
    else:
        bounding.bound(pages, count, both, most)


def step(pool: PagePool, works: Sequence[DecodeStep]) -> None:
    """Apply a step in three launches, two more for each further kind of table rows.

    All updates are in place and no size depends on data, so a step can be captured in a CUDA graph;
    capture it again after the pool or a table has grown. Torch handles candidates in float64.
    """
    from kv_paging.gpu import step as steps

    if steps.able(works):
        steps.step(pool, works)
    else:
        torch_kernels.step(pool, works)


def _known(*vectors: Tensor) -> bool:
    return all(x.dtype in NUMBERS for x in vectors)
