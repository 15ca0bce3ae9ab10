"""Invariants of block ownership: none is lost or owned twice, and blocks cover the held pages."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kv_policy import CacheShape, parse

if TYPE_CHECKING:
    from kv_serve.vllm.spec import PagedManager

SHAPE = CacheShape(layers=3, kv_heads=2, group=2, key_dim=16, value_dim=16, dtype=torch.float32)
BLOCKS = 60
NAMES = st.sampled_from(("a", "b", "c", "d"))
Manager = Callable[..., "PagedManager"]


class Scheduling(RuleBasedStateMachine):
    """Requests over one pool; a worker holds at most the pages that a request may hold."""

    manager: "PagedManager"  # set by the test; each run has a new pool

    def __init__(self) -> None:
        super().__init__()
        self.computed: dict[str, int] = {}  # tokens stored by a worker
        self.asked: dict[str, int] = {}  # tokens for which blocks were requested
        self.held: dict[str, int] = {}  # pages
        self.stages: dict[str, list[tuple[int, int]]] = {}  # pages and tokens after each step

    @rule(name=NAMES, tokens=st.integers(1, 90))
    def schedule(self, name: str, tokens: int) -> None:
        """Allocate missing blocks like vLLM, if the pool has enough."""
        pool, before = self.manager.block_pool, self.manager.owned(name)
        wanted = self.asked.get(name, 0) + tokens
        missing = self.manager.get_num_blocks_to_allocate(name, wanted, [], 0, 0, wanted)
        if missing > pool.get_num_free_blocks():
            return
        new = self.manager.allocate_new_blocks(name, wanted, wanted)
        owned = self.manager.owned(name)
        assert owned[: len(before)] == before
        assert len(owned) == len(before) + missing
        assert tuple(new) == (() if before else owned[:1])
        assert self.manager.req_to_blocks[name] == list(owned[:1])
        self.asked[name] = wanted

    @precondition(lambda self: self.late())
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        """Store the scheduled tokens in the worker, with any allowed number of pages."""
        name = data.draw(st.sampled_from(self.late()))
        most = self.most(name)
        self.held[name] = data.draw(st.one_of(st.just(most), st.integers(1, most)))
        self.computed[name] = self.asked[name]
        self.stages.setdefault(name, []).append((self.held[name], self.computed[name]))

    def most(self, name: str) -> int:
        """Return the bound on the pages of all requested tokens, given the pages held before."""
        account, tokens = self.manager.account, self.asked[name]
        later = (account.later(held, tokens - at) for held, at in self.stages.get(name, ()))
        return min((account.pages(tokens), *later))

    def late(self) -> list[str]:
        return [name for name, n in self.asked.items() if n > self.computed.get(name, 0)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        """Deliver a report to the scheduler, perhaps after the next step is scheduled."""
        name = data.draw(st.sampled_from(sorted(self.held)))
        first, free = self.manager.owned(name)[0], self.manager.block_pool.get_num_free_blocks()
        freed = self.manager.told(name, self.held[name], self.computed[name])
        assert self.manager.owned(name)[0] is first
        assert self.manager.block_pool.get_num_free_blocks() == free + freed
        if self.asked[name] == self.computed[name]:
            needed = self.manager.blocks_for(
                self.asked[name] + 1, (self.held[name], self.computed[name])
            )
            assert len(self.manager.owned(name)) <= needed

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """Finish, abort or preempt a request; it may return with the same name."""
        self.go(data.draw(st.sampled_from(sorted(self.asked))))

    def go(self, name: str) -> None:
        owned = self.manager.owned(name)
        blocks = self.manager.pop_blocks_for_free(name)
        assert tuple(blocks) == owned
        self.manager.block_pool.free_blocks(reversed(blocks))
        for book in (self.asked, self.computed, self.held, self.stages):
            book.pop(name, None)
        assert self.manager.owned(name) == ()
        assert self.manager.told(name, 10**6, 10**6) == 0  # a late report
        assert self.manager.pop_blocks_for_free(name) == []

    @invariant()
    def every_block_is_free_or_owned_once(self) -> None:
        pool = self.manager.block_pool
        owned = [block.block_id for name in self.asked for block in self.manager.owned(name)]
        assert len({*owned, pool.null_block.block_id}) == len(owned) + 1
        assert all(pool.blocks[i].ref_cnt == 1 for i in owned)
        assert pool.get_num_free_blocks() + len(owned) == BLOCKS

    @invariant()
    def what_is_owned_pays_for_what_is_and_may_be_held(self) -> None:
        for name in self.asked:
            paid = len(self.manager.owned(name)) * self.manager.account.block_pages
            assert max(self.held.get(name, 0), self.most(name)) <= paid

    def teardown(self) -> None:
        for name in list(self.asked):
            self.go(name)
        assert self.manager.block_pool.get_num_free_blocks() == BLOCKS
        assert not self.manager.req_to_blocks


@pytest.mark.parametrize(
    "text", ["k8v4:window=8", "leankv:window=0", "k4v4:keys=channel,block=16,window=4"]
)
def test_no_block_is_lost_and_all_that_is_held_is_paid_for(manager_of: Manager, text: str) -> None:
    policy = parse(text)

    class Over(Scheduling):
        def __init__(self) -> None:
            super().__init__()
            self.manager = manager_of(policy, SHAPE, BLOCKS)

    run_state_machine_as_test(
        Over, settings=settings(max_examples=25, stateful_step_count=30, deadline=None)
    )


def test_a_prompt_that_could_never_be_read_is_refused(manager_of: Manager) -> None:
    from kv_serve.vllm.config import UnservableError

    manager = manager_of(parse("k8v4+snapkv:budget=64"), SHAPE, 10)
    manager.expect_room(160, None)
    with pytest.raises(
        UnservableError, match=r"161 tokens takes 11 blocks .* only 10 exist; .* about 146"
    ):
        manager.expect_room(161, None)


def test_a_prompt_that_is_planned_by_chunk_takes_its_budget(manager_of: Manager) -> None:
    from kv_serve.vllm.config import UnservableError

    # Six heads: 64 tokens each take four pages, five of the heads one page more if the first has
    # most of the tokens, and each a page for generated ones: 35 pages.
    manager = manager_of(parse("k8v4+streaming:budget=64,chunks=true"), SHAPE, 6)
    assert manager.account.block_pages == 6
    assert manager.blocks_for(10**6, kept=64) == 6
    manager.expect_room(10**6, 64)
    manager.expect_room(96, 10**6)  # it fits whole
    with pytest.raises(
        UnservableError,
        match="1000000 tokens takes 7 blocks for a budget of 80 tokens per head, but only 6 exist; "
        "give vLLM more KV memory or a smaller budget",
    ):
        manager.expect_room(10**6, 80)
    with pytest.raises(UnservableError, match="takes 62500 blocks until it is compressed"):
        manager.expect_room(10**6, None)


def test_blocks_are_bounded_by_the_budget_until_an_answer_grows(manager_of: Manager) -> None:
    manager = manager_of(parse("k8v4+streaming:budget=64,chunks=true"), SHAPE, 60)
    manager.kept["a"] = 64
    assert manager.get_num_blocks_to_allocate("a", 5000) == 6
    assert manager.get_num_blocks_to_allocate("b", 5000) == 313
    manager.allocate_new_blocks("a", 40)
    manager.prompts["a"] = 5000
    assert len(manager.owned("a")) == 3
    assert manager.get_num_blocks_to_allocate("a", 5000) == 3
    manager.told("a", 12, 400)
    assert manager.get_num_blocks_to_allocate("a", 416) == 0  # 12 pages, and one for each head
    assert manager.get_num_blocks_to_allocate("a", 5000) == 3
    assert manager.get_num_blocks_to_allocate("a", 5100) == 9  # seven pages more for each head
