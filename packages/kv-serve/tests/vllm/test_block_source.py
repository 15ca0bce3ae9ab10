"""Blocks of a pool that other layers use, too: who may write to them, and when."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from kv_policy import CacheShape, parse

if TYPE_CHECKING:
    from kv_serve.vllm.block_source import SharedPool
    from kv_serve.vllm.spec import PagedManager

SHAPE = CacheShape(layers=3, kv_heads=2, group=2, key_dim=16, value_dim=16, dtype=torch.float32)
BLOCKS = 60
NONE: tuple[int, ...] = ()
Manager = Callable[..., "PagedManager"]


@pytest.fixture
def manager(manager_of: Manager) -> "PagedManager":
    made = manager_of(parse("k8v4:window=8"), SHAPE, BLOCKS, kept=True)
    made.lead(())
    return made


@pytest.fixture
def source(manager: "PagedManager") -> "SharedPool":
    from kv_serve.vllm.block_source import SharedPool

    assert isinstance(manager.source, SharedPool)
    return manager.source


def test_the_last_block_is_taken_at_once_as_it_has_the_scratch_page(source: "SharedPool") -> None:
    assert source.most == source.pool.get_num_free_blocks() == BLOCKS - 1
    assert source.changes(1) == (NONE, (BLOCKS,), NONE)
    assert source.changes(2) == (NONE, NONE, NONE)


def test_a_block_is_freed_after_pages_have_moved_out_of_it(source: "SharedPool") -> None:
    blocks = source.allocate(5)
    source.changes(1)
    assert source.release(blocks[3:]) == []
    assert source.missing(4) == 2
    free = source.pool.get_num_free_blocks()
    left, taken, leaving = source.changes(2)
    assert (left, taken) == (NONE, NONE)
    assert leaving == tuple(block.block_id for block in blocks[3:])
    assert source.missing(4) == 4
    assert (source.free_moved(1), source.free_moved(2), source.free_moved(3)) == (0, 2, 0)
    assert source.pool.get_num_free_blocks() == free + 2


def test_idle_blocks_are_taken_first_and_few_stay_idle(source: "SharedPool") -> None:
    from kv_serve.vllm.block_source import SPARE

    blocks = source.allocate(SPARE + 4)
    source.changes(1)
    source.release(blocks[SPARE:])
    assert len(source.changes(2).leaving) == 3
    assert source.allocate(1) == [blocks[SPARE]]
    assert source.changes(3) == (NONE, NONE, NONE)  # workers never lost it


def test_all_idle_blocks_leave_where_blocks_are_short(source: "SharedPool") -> None:
    from kv_serve.vllm.block_source import SPARE

    assert not source.reclaim()
    blocks = source.allocate(SPARE + 1)
    source.changes(1)
    source.release(blocks[SPARE:])
    assert source.reclaim()
    assert len(source.changes(2).leaving) == 1
    assert source.reclaim()  # on its way
    source.free_moved(2)
    assert not source.reclaim()


def test_without_requests_blocks_are_freed_at_once(source: "SharedPool") -> None:
    blocks = source.allocate(3)
    source.changes(1)
    more = source.allocate(1)  # and given back before workers know of it
    assert source.release(blocks) == []
    assert source.release(more) == [*blocks, *more]
    left, taken, leaving = source.changes(2)
    assert {*left} == {block.block_id for block in blocks}
    assert (taken, leaving) == (NONE, NONE)


def test_managers_of_other_groups_name_a_request_by_the_same_block(
    manager_of: Manager, manager: "PagedManager"
) -> None:
    follower = manager_of(parse("k8v4:window=8"), SHAPE, BLOCKS)
    manager.lead([follower])
    assert follower.get_num_blocks_to_allocate("a", 40, [], 0, 0, 40) == 0
    (first,) = manager.allocate_new_blocks("a", 40, 40)
    assert follower.allocate_new_blocks("a", 40, 40) == [first]
    assert manager.allocate_new_blocks("a", 41, 41) == follower.allocate_new_blocks("a", 41, 41)
    assert len(manager.owned("a")) > 1
    assert follower.pop_blocks_for_free("a") == []
    assert first in manager.pop_blocks_for_free("a")
