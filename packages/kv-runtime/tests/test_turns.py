"""Whose turn it is, by the rules of section 4.2.3 of KV-Compress."""

import pytest

from kv_policy import Replan
from kv_runtime.retain.turns import Turns


def test_after_a_prompt_everybody_is_due_once() -> None:
    turns = Turns(Replan())
    turns.prompt(3)
    assert turns.next([5, 5, 5]) == [0, 1, 2]
    turns.done([0, 1, 2])
    assert not turns.waiting
    for _ in range(100):
        turns.step(3)
    assert not turns.waiting


def test_every_so_many_steps() -> None:
    turns = Turns(Replan(every=3))
    turns.prompt(2)
    turns.done([0, 1])
    due = []
    for _ in range(7):
        turns.step(2)
        due.append(turns.waiting)
        if turns.waiting:
            turns.done(turns.next([1, 1]))
    assert due == [False, False, True, False, False, True, False]


def test_above_so_many_tokens_of_the_batch() -> None:
    turns = Turns(Replan(uncompressed=10))
    turns.prompt(4)
    turns.done([0, 1, 2, 3])
    due = []
    for _ in range(3):
        turns.step(4)
        due.append(turns.waiting)
    assert due == [False, False, True]  # 4, 8, 12


def test_a_plan_takes_no_more_than_it_may_and_the_oldest_plan_comes_first() -> None:
    turns = Turns(Replan(every=1, most=10))
    turns.prompt(3)
    sizes = [4, 8, 4]
    order = []
    for _ in range(5):
        chosen = turns.next(sizes)
        order.append(chosen)
        turns.done(chosen)
        turns.step(3)
    # 4 + 8 is too much, so the first goes alone, then the second; the third has room for the first
    assert order == [[0], [1], [0, 2], [1], [0, 2]]


def test_a_sequence_that_is_too_large_alone_is_planned_alone() -> None:
    turns = Turns(Replan(most=3))
    turns.prompt(2)
    assert turns.next([50, 1]) == [0]


def test_where_pages_are_short_the_oldest_plans_come_first_until_enough_is_gained() -> None:
    turns = Turns(Replan(short=True))
    turns.prompt(4)
    turns.done([0, 1])
    turns.step(4)
    turns.done([2, 3])
    turns.step(4)
    sizes, gains = [9, 9, 9, 9], [3, 0, 2, 4]
    assert turns.short(sizes, gains, 1) == [0]
    assert turns.short(sizes, gains, 3) == [0]
    assert turns.short(sizes, gains, 4) == [0, 2]  # the second has nothing to give
    assert turns.short(sizes, gains, 100) == [0, 2, 3]
    assert turns.short(sizes, [0] * 4, 1) == []
    assert not turns.waiting  # nobody became due


def test_where_pages_are_short_a_plan_still_takes_no_more_than_it_may() -> None:
    turns = Turns(Replan(short=True, most=14))
    turns.prompt(3)
    turns.done([0, 1, 2])
    assert turns.short([9, 5, 1], [2, 2, 1], 100) == [0, 1]


def test_turns_follow_their_sequences() -> None:
    turns = Turns(Replan(every=1, most=1))
    turns.prompt(3)
    turns.done([0])
    turns.select([2, 0, 0, 1])
    assert turns.next([1, 1, 1, 1]) == [0]
    turns.done([0])
    assert turns.next([1, 1, 1, 1]) == [3]
    turns.done([3])
    assert not turns.waiting


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"every": -1}, "every is -1"),
        ({"uncompressed": -2}, "uncompressed is -2"),
        ({"most": 0}, "at least 1 token"),
    ],
)
def test_numbers_out_of_range(what: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Replan(**what)


def test_those_that_read_are_due_and_those_that_generate_count_their_own_steps() -> None:
    turns = Turns(Replan(every=3))
    turns.prompt(2, [0])
    assert turns.next([5, 0]) == [0]
    turns.done([0])
    turns.step(2, [0])
    turns.step(2, [0])
    turns.prompt(2, [1])  # the other one's prompt, beside a step
    assert turns.next([7, 1], beside=[0]) == [1]
    turns.done([1])
    turns.step(2, [0])
    assert turns.next([8, 1], among=[0]) == [0]
    turns.done([0])
    for due in ([], [], [0, 1]):
        turns.step(2)
        assert turns.next([9, 9]) == due


def test_those_who_join_are_planned_with_those_that_are_there() -> None:
    here, there = Turns(Replan(every=3)), Turns(Replan(every=3))
    for turns in (here, there):
        turns.prompt(1)
        turns.done([0])
    here.step(1)
    here.step(1)
    here.join(there)
    here.step(2)
    assert here.next([1, 1]) == [0, 1]
