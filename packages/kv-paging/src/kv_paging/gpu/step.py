"""A decode step in three launches: evict victims, free pages, and insert tokens.

A program processes a few table rows and counts the pages they allocate and release; the next launch
sums the counts of earlier programs, so pages are assigned in the order of the reference: by kind of
rows, by tier, and by row. Tables, lengths and the free list that a launch reads are written only by
a later launch, or by the same program past a barrier.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_paging.gpu import numbers
from kv_paging.gpu.step_kernels import enter_kernel, give_kernel, leave_kernel
from kv_paging.gpu.writing import SCAN, positions, scores
from kv_paging.pool import PagePool
from kv_paging.work import DecodeStep
from kv_policy.launching import UNIT, launching_on, strides_of


@dataclass(frozen=True, slots=True)
class TierArguments:
    """The table rows of one kind as kernel arguments, with the moves of the step.

    Widths of tables are multiplied by `UNIT`.
    """

    tables: tuple[Tensor, ...]
    widths: tuple[int, ...]
    lengths: tuple[Tensor, ...]
    layouts: tuple[numbers.Layout, ...]
    choice: tuple[Tensor, Tensor, Tensor]
    place: Tensor
    key: Tensor
    value: Tensor
    score: Tensor | None
    position: Tensor | None
    kept: tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # the victims that move
    table_rows: int

    @classmethod
    def of(cls, work: DecodeStep) -> "TierArguments":
        """Create the arguments of a kind; allocates nothing as large as a cache."""
        token, choice, place = work.candidate, work.choice, work.place.long().contiguous()
        key, value = token.key.detach(), token.value.detach()
        count, room = len(key), torch.empty_like
        return cls(
            tuple(pages.table[:, 0] for pages in work.tiers),
            tuple(UNIT * pages.table.shape[-1] for pages in work.tiers),
            tuple(pages.length[:, 0] for pages in work.tiers),
            tuple(numbers.numbers_of(pages) for pages in work.tiers),
            (choice.candidate.contiguous(), choice.victim.contiguous(), choice.target.contiguous()),
            place,
            key,
            value,
            scores(token.score),
            positions(token.position),
            (
                room(key, dtype=torch.float32, memory_format=torch.contiguous_format),
                room(value, dtype=torch.float32, memory_format=torch.contiguous_format),
                None if token.score is None else place.new_empty(count, dtype=torch.int32),
                None if token.position is None else place.new_empty(count, dtype=torch.int32),
            ),
            count,
        )

    @property
    def rows(self) -> int:
        """Maximum table rows per program."""
        return numbers.table_rows(*self.layouts)


def able(works: Sequence[DecodeStep]) -> bool:
    """Whether kernels support a step: dtypes of the candidates, and contiguous tables."""
    return all(
        numbers.knows(work.candidate.key, work.candidate.value)
        and all(
            pages.table[:, 0].is_contiguous() and pages.length[:, 0].is_contiguous()
            for pages in work.tiers
        )
        for work in works
    )


def step(pool: PagePool, works: Sequence[DecodeStep]) -> None:
    """See `PageKernels.step`; two launches per kind of table rows, and one for all."""
    parts = [TierArguments.of(work) for work in works]
    rows = min(part.rows for part in parts)
    first, blocks = [], 0
    for part in parts:
        first.append(blocks)
        blocks += len(part.layouts) * numbers.blocks(part.table_rows, rows)
    data, ring = pool.padded, pool.ring
    pitch, size = data.stride(0), max(len(ring.ids) - 1, 1)
    given = ring.ids.new_empty(blocks, rows)
    gives, takes, after = (
        ring.ids.new_empty(blocks),
        ring.ids.new_empty(2 * blocks),
        ring.start.new_empty(3),
    )
    with launching_on(data):
        for part, begin in zip(parts, first, strict=True):
            leave_kernel[(numbers.blocks(part.table_rows, rows),)](
                data,
                pitch,
                part.tables,
                part.widths,
                part.lengths,
                *part.choice,
                part.place,
                part.table_rows,
                part.kept,
                given,
                gives,
                takes,
                begin,
                part.layouts,
                rows,
            )
        give_kernel[(blocks,)](
            data,
            pitch,
            data.shape[1],
            ring.ids,
            ring.start,
            ring.count,
            after,
            size,
            given,
            gives,
            takes,
            pool.poison,
            rows,
            SCAN,
        )
        for part, begin in zip(parts, first, strict=True):
            enter_kernel[(numbers.blocks(part.table_rows, rows),)](
                data,
                pitch,
                part.tables,
                part.widths,
                part.lengths,
                *part.choice,
                part.place,
                part.table_rows,
                part.kept,
                part.key,
                strides_of(part.key),
                part.value,
                strides_of(part.value),
                part.score,
                part.position,
                ring.ids,
                ring.start,
                ring.count,
                after,
                size,
                takes,
                begin,
                part.layouts,
                rows,
                SCAN,
            )
