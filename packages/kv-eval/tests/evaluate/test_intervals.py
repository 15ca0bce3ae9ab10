"""Intervals of means, beside published figures and their own definition."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_eval.evaluate.intervals import of_change, of_mean

SCORES = st.lists(st.floats(-5, 5), min_size=2, max_size=40).filter(
    lambda scores: not {*scores} <= {0, 1}
)
DECIDED = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe (1998), table I, method 3
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_shares_have_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    scores = [1.0] * right + [0.0] * (count - right)
    assert of_mean(scores) == pytest.approx((low, high), abs=5e-5)


def test_changes_of_right_answers_have_agresti_and_mins_interval() -> None:
    # 4 lost and 1 won of 20: counts of 4.5 and 1.5 of 22
    scores, before = [0.0] * 4 + [1.0] * 16, [1.0] * 4 + [0.0] + [1.0] * 15
    assert of_change(scores, before) == pytest.approx((-0.34702, 0.07429), abs=5e-5)
    same = of_change([1.0] * 16, [1.0] * 16)
    assert same is not None
    assert same[0] == -same[1] < 0  # sixteen that did not change do not prove that none does


@given(DECIDED)
def test_shares_lie_in_their_interval(scores: list[float]) -> None:
    low, high = of_mean(scores)
    assert 0 <= low <= sum(scores) / len(scores) <= high <= 1
    assert high > low


@given(SCORES)
def test_a_mean_lies_in_its_interval(scores: list[float]) -> None:
    low, high = of_mean(scores)
    assert min(scores) - 1e-9 <= low <= high <= max(scores) + 1e-9
    assert of_mean(scores) == (low, high)


@given(SCORES, st.floats(-3, 3))
def test_a_change_of_all_alike_is_certain(before: list[float], change: float) -> None:
    scores = [score + change for score in before]
    if all(score in (0, 1) for score in [*scores, *before]):
        return
    assert of_change(scores, before) == pytest.approx((change, change), abs=1e-6)


def test_a_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    random_ = random.Random(5)
    held = 0
    for _ in range(200):
        low, high = of_mean([random_.gauss(3, 1) for _ in range(30)])
        held += low <= 3 <= high
    assert 175 <= held <= 199


def test_one_figure_says_nothing_of_others() -> None:
    assert of_mean([2.5]) is None
    assert of_change([2.5], [2.0]) is None
    assert of_mean([1.0]) is not None


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least one score"):
        of_mean([])
    with pytest.raises(ValueError, match="at least one score"):
        of_change([], [])
    with pytest.raises(ValueError, match="shorter"):
        of_change([1.0, 0.0], [1.0])
