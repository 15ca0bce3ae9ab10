"""The page kernels `cpu` of kv-paging, which write, move and read tokens in pages natively.

Pages are bit-identical to those of `kv_paging.torch_kernels`, except for the payload of a NaN that
is stored unchanged. Rows and tables are checked before anything is written, and a missing page
raises an error.
"""

from collections.abc import Sequence

import torch
from jaxtyping import BFloat16, Bool, Float, Int, UInt8
from torch import Tensor

from kv_cpu.arguments import MOST_DIM
from kv_cpu.library import chosen, missing
from kv_paging import (
    DecodeStep,
    PagePool,
    Recoding,
    Stored,
    TokenWrite,
    VectorNames,
    bound_decoded,
    torch_kernels,
)
from kv_policy import PagedTokens, PageLayout, Running, RunningSum
from kv_policy.described import NUMBERS, described

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


def declined(layout: PageLayout, device: torch.device) -> str | None:
    """Return why native code does not support pages of a layout; None if it does."""
    if device.type != "cpu":
        return f"pages on {device.type}"
    if max(layout.format.key.dim, layout.format.value.dim) > MOST_DIM:
        return f"vectors of more than {MOST_DIM} dimensions"
    return described(layout, planes=True).declined


def write(pages: PagedTokens, tokens: TokenWrite) -> None:
    """Encode tokens and write them; torch encodes vectors in float64.

    Raises:
        RuntimeError: a table names a missing page; nothing was written.
    """
    if tokens.key.dtype not in NUMBERS or tokens.value.dtype not in NUMBERS:
        torch_kernels.write(pages, tokens)
        return
    torch.ops.kv_cpu.page_write(
        *_tier(pages),
        tokens.table_rows.contiguous(),
        tokens.start.contiguous(),
        tokens.keep.contiguous(),
        _rows(tokens.key),
        _rows(tokens.value),
        [*_scores(tokens.score), *_positions(tokens.position)],
        chosen(),
    )


def recode(pages: PagedTokens, tokens: Recoding) -> None:
    """Encode stored tokens in another format, a few at a time, without a tensor of their numbers.

    Raises:
        RuntimeError: a table names a missing page; nothing was written.
    """
    torch.ops.kv_cpu.page_recode(
        *_tier(pages),
        tokens.table_rows.contiguous(),
        tokens.start.contiguous(),
        tokens.keep.contiguous(),
        *_tier(tokens.source),
        tokens.source_rows.contiguous(),
        chosen(),
    )


def place(
    data: UInt8[Tensor, "P nbytes"],
    layout: PageLayout,
    page: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    key: Float[Tensor, "m H D"],
    value: Float[Tensor, "m H Dv"],
) -> None:
    """Encode tokens and write each to its row of its page; those of adjacent rows together.

    Raises:
        RuntimeError: a page is missing; nothing was written.
    """
    if len(page) == 0:
        return
    if key.dtype not in NUMBERS or value.dtype not in NUMBERS:
        torch_kernels.place(data, layout, page, row, key, value)
        return
    torch.ops.kv_cpu.page_place(
        data,
        tier_numbers(layout, False),
        page.contiguous(),
        row.contiguous(),
        _rows(key),
        _rows(value),
        chosen(),
    )


def compact(pages: PagedTokens, table_rows: Int[Tensor, " S"], stay: Bool[Tensor, "S R"]) -> None:
    """Move kept tokens to the front.

    Raises:
        RuntimeError: a table names a missing page; nothing was moved.
    """
    torch.ops.kv_cpu.page_compact(*_tier(pages), table_rows.contiguous(), stay.contiguous())


def copy_pages(
    data: UInt8[Tensor, "P nbytes"], source: Int[Tensor, " n"], target: Int[Tensor, " n"]
) -> None:
    """Copy whole pages.

    Raises:
        RuntimeError: a page is missing; nothing was copied.
    """
    if not data.is_contiguous():  # external memory, see PagePool.over
        torch_kernels.copy_pages(data, source, target)
        return
    torch.ops.kv_cpu.page_copy(data, source.contiguous(), target.contiguous())


def read(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    slots: int,
    vectors: VectorNames,
    start: Int[Tensor, " S"] | None = None,
) -> Stored:
    """Read tokens.

    Raises:
        RuntimeError: a table names a missing page.
    """
    layout, wanted = pages.layout, ("keys" in vectors, "values" in vectors)
    found = iter(
        torch.ops.kv_cpu.page_read(
            *_tier(pages),
            pages.length[:, 0],
            table_rows.contiguous(),
            torch.zeros_like(table_rows) if start is None else start.contiguous(),
            slots,
            *wanted,
            chosen(),
        )
    )
    there = (True, layout.scores, layout.positions, *wanted)
    held, *rest = (next(found) if some else None for some in there)
    assert held is not None
    return Stored(held, *rest)


def rescore(pages: PagedTokens, table_rows: Int[Tensor, " S"], score: Float[Tensor, "S L"]) -> None:
    """Write new scores.

    Raises:
        RuntimeError: a table names a missing page; nothing was written.
    """
    torch.ops.kv_cpu.page_rescore(
        *_tier(pages), pages.length[:, 0], table_rows.contiguous(), *_scores(score)
    )


def accumulate(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    before: Int[Tensor, " S"],
    mass: Float[Tensor, "S L"],
    seen: Int[Tensor, "S L"],
    running: Running,
    position: Int[Tensor, "S L"] | None = None,
) -> None:
    """Update scores; torch does if pages store no positions.

    Raises:
        RuntimeError: a table names a missing page; nothing was written.
    """
    if position is not None:
        torch_kernels.accumulate(pages, table_rows, before, mass, seen, running, position)
        return
    torch.ops.kv_cpu.page_accumulate(
        *_tier(pages),
        pages.length[:, 0],
        table_rows.contiguous(),
        before.contiguous(),
        mass.float().contiguous(),
        seen.contiguous(),
        *running_numbers(running),
    )


def running_numbers(running: Running) -> tuple[int, int]:
    """Return native arguments: a mean's past weight, -1: no limit; a divisor, 0 for a mean."""
    if isinstance(running, RunningSum):
        return -1, running.over
    return -1 if running.last is None else running.last, 0


def weakest(
    pages: PagedTokens,
    table_rows: Int[Tensor, " S"],
    slots: int,
    until: Int[Tensor, " S"] | None,
) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
    """Find the lowest scores.

    Raises:
        RuntimeError: a table names a missing page.
    """
    bound = table_rows[:0] if until is None else until
    score, slot = torch.ops.kv_cpu.page_weakest(
        *_tier(pages), pages.length[:, 0], table_rows.contiguous(), slots, bound.contiguous()
    )
    return score, slot


def bound(
    pages: PagedTokens,
    count: Int[Tensor, " S"],
    both: BFloat16[Tensor, "*T _"] | UInt8[Tensor, "*T _"],
    most: int,
) -> None:
    """Bound keys, or encode them, some pages at a time.

    Raises:
        RuntimeError: a table names a missing page.
    """
    bound_decoded(read, pages, count, both)


def step(pool: PagePool, works: Sequence[DecodeStep]) -> None:
    """Apply a step in one call; torch handles candidates in float64.

    Raises:
        RuntimeError: a table or the pool names a missing page, or the pool has too few pages;
            nothing has changed.
    """
    candidates = [work.candidate for work in works]
    if not all(x.dtype in NUMBERS for each in candidates for x in (each.key, each.value)):
        torch_kernels.step(pool, works)
        return
    ring = pool.ring
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for work in works:
        token, choice = work.candidate, work.choice
        tensors += (x.contiguous() for x in (choice.candidate, choice.victim, choice.target))
        tensors += (work.place.long().contiguous(), _rows(token.key[:, None]))
        tensors.append(_rows(token.value[:, None]))
        none = work.place.new_empty(0)
        tensors += (*_scores(token.score), none)[:1]
        tensors += (*_positions(token.position), none)[:1]
        numbers.append(len(work.tiers))
        for pages in work.tiers:
            tensors += (pages.table[:, 0], pages.length[:, 0])
            numbers += tier_numbers(pages.layout, pages.reverse)
    torch.ops.kv_cpu.page_step(
        pool.data, ring.ids, ring.start, ring.count, tensors, numbers, pool.poison, chosen()
    )


def _tier(pages: PagedTokens) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Return the arguments of a tier except its lengths, without the scratch page."""
    return pages.data[:-1], pages.table[:, 0], tier_numbers(pages.layout, pages.reverse)


def tier_numbers(layout: PageLayout, reverse: bool) -> Sequence[int]:
    """Return the numbers of a tier's pages."""
    pages = described(layout, planes=True)
    score = layout.score_offset if layout.scores else -1
    position = pages.positions if layout.positions else -1
    return [*pages.places, score, position, int(reverse), *pages.formats, *pages.levels]


def _rows(x: Float[Tensor, "S L D"]) -> Float[Tensor, "S L D"]:
    x = x.detach()
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _scores(score: Tensor | None) -> list[Tensor]:
    return [] if score is None else [score.detach().to(torch.float32).contiguous()]


def _positions(position: Tensor | None) -> list[Tensor]:
    if position is None:
        return []
    wide = position.dtype in (torch.int32, torch.int64)
    return [(position if wide else position.long()).contiguous()]
