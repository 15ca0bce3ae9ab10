"""Who computes which head, where heads differ in length and dimensions (ZACK, section 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """Which worker does each task, and how much work each worker has."""

    worker: tuple[int, ...]
    load: tuple[int, ...]

    @property
    def makespan(self) -> int:
        """The work of the busiest worker, which all wait for."""
        return max(self.load)


def longest_first(work: Sequence[int], workers: int) -> Assignment:
    """Give the longest task that is left to the worker with the least work, again and again.

    The makespan is at most 4/3 - 1/(3 workers) times the least possible (Graham, 1969). Of equal
    tasks the earlier goes first, and of equal workers the first takes it.

    Args:
        work: of each task, in any unit.
        workers: how many there are.

    Raises:
        ValueError: no worker, or a task of negative work.
    """
    if workers < 1:
        raise ValueError(f"{workers} workers do no work; give at least 1")
    if min(work, default=0) < 0:
        raise ValueError(f"a task has {min(work)} of work; give 0 or more")
    loads = [(0, worker) for worker in range(workers)]
    heapify(loads)
    chosen = [0] * len(work)
    for task in sorted(range(len(work)), key=lambda i: -work[i]):
        load, worker = loads[0]
        heapreplace(loads, (load + work[task], worker))
        chosen[task] = worker
    return Assignment(tuple(chosen), tuple(load for load, _ in sorted(loads, key=lambda x: x[1])))


def least_makespan(work: Sequence[int], workers: int) -> int:
    """No assignment has less: the longest task, or an even split, whichever is more."""
    return max(max(work, default=0), -(-sum(work) // workers))


def decode_work(
    length: Int[Tensor, "B H"], key_dim: Int[Tensor, " H"], value_dim: Int[Tensor, " H"]
) -> Int[Tensor, "B H"]:
    """Count the products of one query: a token costs its key, its value and its softmax."""
    return length * (key_dim + value_dim + 1)


def prefill_rows(
    key_dim: Int[Tensor, " H"], value_dim: Int[Tensor, " H"], rows: int = 64, multiple: int = 16
) -> Int[Tensor, " H"]:
    """Queries in a block of each head, so that blocks of all heads cost about the same.

    The head of the most dimensions has `rows`; others have more, rounded up to what a tensor core
    takes at a time.

    Raises:
        ValueError: `rows` is not a multiple of `multiple`.
    """
    if rows < 1 or rows % multiple:
        raise ValueError(f"blocks of {rows} queries are no multiple of {multiple}")
    total = key_dim + value_dim + 1
    wanted = rows * int(total.max()) / total.double()
    return (wanted / multiple - 1e-9).ceil().long() * multiple


def last_round(
    blocks: Sequence[int], dims: Sequence[int], workers: int, multiple: int = 16
) -> tuple[list[tuple[int, int]], Assignment]:
    """Cut the blocks of a round that does not fill all workers, and share them out.

    Args:
        blocks: queries in each block that is left.
        dims: d_qk + d_v + 1 of each block's head.
        workers: how many there are.
        multiple: queries that a piece is a multiple of, but for a block's last one.

    Returns:
        Pieces as (block, queries), in order, and who does each: the worker with the least work.
    """
    total = sum(rows * dim for rows, dim in zip(blocks, dims, strict=True))
    pieces: list[tuple[int, int]] = []
    for block, (rows, dim) in enumerate(zip(blocks, dims, strict=True)):
        size = max(multiple, round(total / workers / dim / multiple) * multiple)
        pieces += [(block, min(size, rows - start)) for start in range(0, rows, size)]
    work = [rows * dims[block] for block, rows in pieces]
    return pieces, longest_first(work, workers)
