"""Blocks of a pool that other layers use, too: who may write to them, and when."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from kv_policy import CacheShape, parse

if TYPE_CHECKING:
    from kv_serve.vllm.spec import PagedManager
    from kv_serve.vllm.supply import SharedPool

SHAPE = CacheShape(layers=3, kv_heads=2, group=2, key_dim=16, value_dim=16, dtype=torch.float32)
BLOCKS = 60
NONE: tuple[int, ...] = ()
Manager = Callable[..., "PagedManager"]


@pytest.fixture
def manager(manager_of: Manager) -> "PagedManager":
    made = manager_of(parse("k8v4:window=8"), SHAPE, BLOCKS)
    made.lead((), shared=True)
    return made


@pytest.fixture
def supply(manager: "PagedManager") -> "SharedPool":
    from kv_serve.vllm.supply import SharedPool

    assert isinstance(manager.supply, SharedPool)
    return manager.supply


def test_the_last_block_is_taken_at_once_as_it_has_the_scratch_page(supply: "SharedPool") -> None:
    assert supply.most == supply.pool.get_num_free_blocks() == BLOCKS - 1
    assert supply.changes(1) == (NONE, (BLOCKS,), NONE)
    assert supply.changes(2) == (NONE, NONE, NONE)


def test_a_block_is_freed_after_pages_have_moved_out_of_it(supply: "SharedPool") -> None:
    blocks = supply.take(5)
    supply.changes(1)
    assert supply.release(blocks[3:]) == []
    assert supply.missing(4) == 2
    free = supply.pool.get_num_free_blocks()
    left, taken, leaving = supply.changes(2)
    assert (left, taken) == (NONE, NONE)
    assert leaving == tuple(block.block_id for block in blocks[3:])
    assert supply.missing(4) == 4
    assert (supply.moved(1), supply.moved(2), supply.moved(3)) == (0, 2, 0)
    assert supply.pool.get_num_free_blocks() == free + 2


def test_idle_blocks_are_taken_first_and_few_stay_idle(supply: "SharedPool") -> None:
    from kv_serve.vllm.supply import SPARE

    blocks = supply.take(SPARE + 4)
    supply.changes(1)
    supply.release(blocks[SPARE:])
    assert len(supply.changes(2).leaving) == 3
    assert supply.take(1) == [blocks[SPARE]]
    assert supply.changes(3) == (NONE, NONE, NONE)  # workers never lost it


def test_all_idle_blocks_leave_where_blocks_are_short(supply: "SharedPool") -> None:
    from kv_serve.vllm.supply import SPARE

    assert not supply.hurry()
    blocks = supply.take(SPARE + 1)
    supply.changes(1)
    supply.release(blocks[SPARE:])
    assert supply.hurry()
    assert len(supply.changes(2).leaving) == 1
    assert supply.hurry()  # on its way
    supply.moved(2)
    assert not supply.hurry()


def test_without_requests_blocks_are_freed_at_once(supply: "SharedPool") -> None:
    blocks = supply.take(3)
    supply.changes(1)
    more = supply.take(1)  # and given back before workers know of it
    assert supply.release(blocks) == []
    assert supply.release(more) == [*blocks, *more]
    left, taken, leaving = supply.changes(2)
    assert {*left} == {block.block_id for block in blocks}
    assert (taken, leaving) == (NONE, NONE)


def test_managers_of_other_groups_name_a_request_by_the_same_block(
    manager_of: Manager, manager: "PagedManager"
) -> None:
    follower = manager_of(parse("k8v4:window=8"), SHAPE, BLOCKS)
    manager.lead([follower], shared=False)
    assert follower.get_num_blocks_to_allocate("a", 40, [], 0, 0, 40) == 0
    (first,) = manager.allocate_new_blocks("a", 40, 40)
    assert follower.allocate_new_blocks("a", 40, 40) == [first]
    assert manager.allocate_new_blocks("a", 41, 41) == follower.allocate_new_blocks("a", 41, 41)
    assert len(manager.owned("a")) > 1
    assert follower.pop_blocks_for_free("a") == []
    assert first in manager.pop_blocks_for_free("a")
