"""The pool: the holders of pages after any program of operations."""

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_paging import PagePool, PoolExhausted


def test_pages_go_round_in_the_order_in_which_they_became_free() -> None:
    pool = PagePool(8, 5, grows=False)
    first = pool.allocate(3)
    assert first.tolist() == [0, 1, 2]
    pool.release(torch.tensor([2, 0]))
    assert pool.allocate(4).tolist() == [3, 4, 2, 0]
    assert (pool.capacity, pool.free, pool.used) == (5, 0, 5)


@settings(deadline=None, derandomize=True)
@given(
    grows=st.booleans(),
    pages=st.integers(1, 9),
    program=st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.randoms()), max_size=30),
)
def test_programs_against_a_queue(grows: bool, pages: int, program: list) -> None:
    pool = PagePool(4, pages, grows=grows)
    free, held = deque(range(pages)), []
    for take, count, random in program:
        if take:
            if count > len(free) and not grows:
                with pytest.raises(PoolExhausted) as error:
                    pool.allocate(count)
                assert (error.value.needed, error.value.free) == (count, len(free))
            else:
                got = pool.allocate(count).tolist()
                free.extend(range(len(free) + len(held), pool.capacity))
                assert got == [free.popleft() for _ in range(count)]
                held += got
        else:
            random.shuffle(held)
            back, held = held[:count], held[count:]
            pool.release(torch.tensor(back, dtype=torch.long))
            free.extend(back)
        pool.check(torch.tensor(held, dtype=torch.long))
        assert (pool.free, pool.used) == (len(free), len(held))
        assert pool.capacity == len(pool.data) == len(free) + len(held)


def test_growth_keeps_ids_and_bytes() -> None:
    pool = PagePool(3, 2)
    pages = pool.allocate(2)
    pool.data[pages] = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)
    assert pool.allocate(1).tolist() == [2]
    assert pool.data[pages].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_growth_is_by_what_is_missing_and_by_a_sixteenth_at_least() -> None:
    pool = PagePool(1, 160)
    pool.allocate(161)
    assert pool.capacity == 170
    pool.allocate(109)
    assert pool.capacity == 270


def test_reserve_grows_by_exactly_what_is_missing() -> None:
    pool = PagePool(1, 100)
    pool.allocate(99)
    pool.reserve(1)
    assert pool.capacity == 100
    pool.reserve(3)
    assert (pool.capacity, pool.free) == (102, 3)
    fixed = PagePool(1, 2, grows=False)
    fixed.reserve(2)
    with pytest.raises(PoolExhausted, match="3 pages are needed and 2 are free"):
        fixed.reserve(3)


def test_memory_is_counted() -> None:
    pool = PagePool(104, 10)
    assert (pool.held_bytes, pool.table_bytes) == (1040, 4 * 11 + 2 * 8 + 104)
    assert pool.held_bytes == pool.data.numel() == pool.padded.numel() - 104


def test_poison_covers_what_is_new_and_what_comes_back() -> None:
    pool = PagePool(4, 1, poison=True)
    assert pool.data.view(torch.float32).isnan().all()
    pages = pool.allocate(3)
    pool.data[pages] = 1
    pool.release(pages[:2])
    assert pool.data.view(torch.float32).isnan().flatten().tolist() == [True, True, False]
    assert pool.data[:2].view(torch.bfloat16).isnan().all()
    assert pool.data[:2].view(torch.float16).isnan().all()


def test_check_names_the_page() -> None:
    pool = PagePool(1, 4)
    held = pool.allocate(2)
    pool.check(held)
    with pytest.raises(RuntimeError, match="page 1 occurs 0 times"):
        pool.check(held[:1])
    with pytest.raises(RuntimeError, match="page 0 occurs 2 times"):
        pool.check(torch.tensor([0, 1, 0]))
    with pytest.raises(RuntimeError, match="page 3 occurs 2 times"):
        pool.check(torch.tensor([0, 1, 3]))
    with pytest.raises(RuntimeError, match="page 4 does not exist"):
        pool.check(torch.tensor([0, 1, 4]))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="a page of 0 bytes"):
        PagePool(0)
    with pytest.raises(ValueError, match="at least 0, or let it grow"):
        PagePool(8, -1)
    with pytest.raises(ValueError, match="a pool of 0 pages is too small"):
        PagePool(8, 0, grows=False)
    pool = PagePool(8, 2)
    with pytest.raises(ValueError, match="-1 pages cannot be allocated"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="1 pages are released and only 0 are held"):
        pool.release(torch.tensor([0]))


@settings(deadline=None, derandomize=True)
@given(
    theirs=st.sets(st.integers(0, 11)),
    held=st.integers(0, 12),
    leaving=st.sets(st.integers(0, 11)),
)
def test_withdrawn_pages_hold_nothing_and_what_they_held_moves(
    theirs: set[int], held: int, leaving: set[int]
) -> None:
    memory = torch.full((13, 4), 99, dtype=torch.uint8)
    pool = PagePool.over(memory, free=False)
    assert (pool.free, pool.least_free) == (0, 0)
    given = [page for page in range(12) if page not in theirs]
    pool.release(torch.tensor(given, dtype=torch.long))
    mine = pool.allocate(min(held, len(given)))
    memory[mine] = mine[:, None].to(torch.uint8)
    leaving -= theirs
    moving, free = leaving & set(mine.tolist()), {*given} - set(mine.tolist())
    pages = torch.tensor(sorted(leaving), dtype=torch.long)
    if len(moving) > len(free - leaving):
        before = memory.clone(), pool.ring.first(pool.free).tolist()
        with pytest.raises(PoolExhausted):
            pool.withdraw(pages)
        assert torch.equal(memory, before[0])
        assert pool.ring.first(pool.free).tolist() == before[1]
        return
    ids = pool.withdraw(pages)
    assert (ids is None) == (not moving)
    now = mine if ids is None else ids[mine]
    assert torch.equal(memory[now], mine[:, None].to(torch.uint8).expand(-1, 4))
    assert not leaving & {*now.tolist()}
    left = {*pool.ring.first(pool.free).tolist()}
    assert left == {*given} - leaving - {*now.tolist()}
    assert pool.least_free == len(left)
    assert ids is None or ids[12] == 12  # the scratch page
    pool.release(pages)
    assert pool.free == len(given) - len(mine)


def test_a_withdrawn_page_ends_what_was_reserved() -> None:
    pool = PagePool.over(torch.zeros(9, 4, dtype=torch.uint8))
    assert pool.ensure(5)
    before = pool.promises
    pool.withdraw(torch.tensor([0, 1]))
    assert pool.promises != before
    assert pool.least_free == 6
