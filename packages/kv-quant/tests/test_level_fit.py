"""Levels with the least squared error: those of all divisions of the bins, tried one by one."""

import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_quant import level_fit
from kv_quant.codebook import LEVELS
from kv_quant.level_fit import bin_sums, fitted_levels, squared_error

FEW = 9


def middles(bins: int) -> Tensor:
    return (torch.arange(bins, dtype=torch.float64) + 0.5) / bins


def best_of_all(sums: Tensor, count: int) -> float:
    """Return the least squared error of any division of the bins into runs with a mean each."""
    found = math.inf
    for cuts in combinations(range(1, sums.shape[1]), count - 1):
        error = 0.0
        for start, stop in pairwise((0, *cuts, sums.shape[1])):
            weight, first, second = sums[:, start:stop].sum(1).tolist()
            error += second - first * first / weight if weight else 0.0
        found = min(found, error)
    return found


def exact_error(x: Tensor, weight: Tensor, levels: tuple[float, ...]) -> float:
    """Return the squared error of numbers that are rounded to the nearest level."""
    off = (x[:, None] - torch.tensor(levels, dtype=torch.float64)).abs().amin(1)
    return float((weight * off.square()).sum())


@given(
    weights=st.lists(st.floats(0, 10), min_size=FEW, max_size=FEW).filter(lambda w: sum(w) > 1),
    count=st.integers(1, FEW),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_division_of_the_bins_has_a_smaller_error(weights: list[float], count: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(level_fit, "BINS", FEW)
        x, weight = middles(FEW), torch.tensor(weights, dtype=torch.float64)
        sums = bin_sums(x, weight)
        levels = fitted_levels(sums, (count,))[count]
        assert len(levels) == count
        assert all(a < b for a, b in pairwise(levels))
        slack = 1e-6 * float(sums[0].sum())  # all bins have a millionth of the weight
        assert squared_error(sums, levels) <= best_of_all(sums, count) + slack


def test_levels_of_normal_numbers_are_those_of_the_codebook() -> None:
    x, wide = middles(2**16), 8.0
    normal = (x - 0.5) * 2 * wide
    sums = bin_sums(x, torch.exp(-normal * normal / 2))
    found = fitted_levels(sums, (2, 4, 8, 16))
    for bits, levels in LEVELS.items():
        assert [(x - 0.5) * 2 * wide for x in found[2**bits]] == pytest.approx(levels, abs=0.02)
        known = tuple(level / (2 * wide) + 0.5 for level in levels)
        assert squared_error(sums, found[2**bits]) <= squared_error(sums, known) * 1.001


@given(seed=st.integers(0, 99), count=st.sampled_from([2, 4, 8, 16]))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_the_error_is_that_of_the_numbers_and_fitted_levels_lose_less_than_even_steps(
    seed: int, count: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(3001, generator=draw, dtype=torch.float64) / 8 + 0.4).clamp(0, 1)
    weight = torch.rand(3001, generator=draw, dtype=torch.float64) ** 4
    sums = bin_sums(x, weight)
    levels = fitted_levels(sums, (count,))[count]
    exact = exact_error(x, weight, levels)
    assert squared_error(sums, levels) == pytest.approx(exact, rel=0.02, abs=1e-6)
    assert exact < exact_error(x, weight, tuple(code / (count - 1) for code in range(count)))


def test_sums_hold_numbers_at_and_beyond_the_ends() -> None:
    x = torch.tensor([-0.5, 0.0, 0.5, 1.0, 1.5], dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    sums = bin_sums(x, weight)
    assert sums[0, 0] == 3
    assert sums[0, -1] == 24
    assert sums[1].sum() == (x * weight).sum()
    assert sums[2].sum() == (x * x * weight).sum()


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_weights_that_fit_nothing_are_refused(value: float) -> None:
    sums = torch.full((3, level_fit.BINS), value, dtype=torch.float64)
    with pytest.raises(ValueError, match="levels are fitted to a positive weight"):
        fitted_levels(sums, (4,))
