"""Schedules of uneven work, against lower bounds and against every assignment there is."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_attention.balance import (
    decode_work,
    last_round,
    least_makespan,
    longest_first,
    prefill_rows,
)

TASKS = st.lists(st.integers(0, 50), max_size=7)


@given(TASKS, st.integers(1, 3))
def test_near_the_best_of_all_assignments(work: list[int], workers: int) -> None:
    found = longest_first(work, workers)
    best = min(
        max(sum(w for w, at in zip(work, chosen, strict=True) if at == k) for k in range(workers))
        for chosen in product(range(workers), repeat=len(work))
    )
    assert best <= found.makespan <= (4 / 3 - 1 / (3 * workers)) * best + 1e-9
    assert least_makespan(work, workers) <= best


@given(st.lists(st.integers(0, 10**6), max_size=200), st.integers(1, 132))
def test_loads_are_those_of_the_tasks(work: list[int], workers: int) -> None:
    found = longest_first(work, workers)
    loads = [0] * workers
    for each, worker in zip(work, found.worker, strict=True):
        loads[worker] += each
    assert list(found.load) == loads
    assert found.makespan <= least_makespan(work, workers) + max(work, default=0)


def test_the_example_of_the_paper() -> None:
    # tasks by falling time on three workers: each goes to the one with the least so far
    found = longest_first([8, 7, 6, 5, 4, 3, 2], 3)
    assert found.worker == (0, 1, 2, 2, 1, 0, 0)
    assert found.load == (13, 11, 11)


def test_heads_of_fewer_dimensions_are_less_work() -> None:
    work = decode_work(
        torch.tensor([[100, 50], [10, 0]]), torch.tensor([64, 16]), torch.tensor([32, 16])
    )
    assert work.tolist() == [[9700, 1650], [970, 0]]


def test_blocks_of_all_heads_cost_about_the_same() -> None:
    key, value = torch.tensor([64, 48, 16]), torch.tensor([64, 16, 16])
    rows = prefill_rows(key, value)
    assert rows.tolist() == [64, 128, 256]
    cost = rows * (key + value + 1)
    assert bool((cost >= cost[0]).all())
    assert bool((cost - cost[0] < 16 * (key + value + 1)).all())


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(3, 257)), min_size=1, max_size=20),
    st.integers(1, 20),
)
def test_the_last_round_is_cut_and_shared(tasks: list[tuple[int, int]], workers: int) -> None:
    blocks, dims = [rows for rows, _ in tasks], [dim for _, dim in tasks]
    pieces, found = last_round(blocks, dims, workers)
    whole = [0] * len(blocks)
    for block, rows in pieces:
        assert rows > 0
        whole[block] += rows
    assert whole == blocks
    work = [rows * dims[block] for block, rows in pieces]
    assert found.makespan <= least_makespan(work, workers) + max(work)
    uncut = longest_first([rows * dim for rows, dim in tasks], workers)
    assert found.makespan <= uncut.makespan + max(work)


@pytest.mark.parametrize(("work", "workers"), [([1], 0), ([1, -1], 2)])
def test_what_is_no_schedule(work: list[int], workers: int) -> None:
    with pytest.raises(ValueError, match="work"):
        longest_first(work, workers)


def test_rows_that_no_tensor_core_takes() -> None:
    with pytest.raises(ValueError, match="blocks of 60 queries are no multiple of 16"):
        prefill_rows(torch.tensor([64]), torch.tensor([64]), rows=60)
