"""From a rate to ranks: laws, and Eq. 6 of the paper by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kv_svd.rates as rates_module
from kv_svd import at_rate, at_removal, uniform
from kv_svd.rates import Allotment, greatest_rate, levels


def spectra(seed: int, layers: int = 3, heads: int = 2, dim: int = 32) -> tuple[Tensor, Tensor]:
    """Descending singular values of heads that need different numbers of dimensions."""
    draw = torch.Generator().manual_seed(seed)
    fall = torch.rand(2, layers, heads, 1, generator=draw, dtype=torch.float64) * 0.4 + 0.02
    noise = 1 + 0.01 * torch.rand(2, layers, heads, dim, generator=draw, dtype=torch.float64)
    key, value = (torch.exp(-fall * torch.arange(dim)) * noise).sort(-1, descending=True).values
    return key, value


@given(st.integers(0, 99), st.floats(0, 0.9), st.sampled_from([1, 4, 16]))
def test_a_rate_is_reached_by_the_least_removal(seed: int, rate: float, multiple: int) -> None:
    key, value = spectra(seed)
    try:
        found = at_rate(key, value, rate, multiple)
    except ValueError:
        assert rate > 1 - multiple / 32  # no dimension left to drop
        return
    assert found.rate >= rate
    assert found.removal is not None
    if found.removal > 0:
        assert at_removal(key, value, found.removal * (1 - 1e-9), multiple).rate < rate
    for kept in (found.key, found.value):
        assert bool((kept % multiple == 0).all())
        assert int(kept.min()) >= 1


@given(st.integers(0, 99), st.floats(0, 0.98), st.floats(0, 0.98))
def test_more_removal_never_removes_less(seed: int, one: float, other: float) -> None:
    key, value = spectra(seed)
    low, high = sorted((one, other))
    assert at_removal(key, value, low).rate <= at_removal(key, value, high).rate


def test_equation_6_by_hand() -> None:
    key = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]]).double()
    value = torch.tensor([[[10.0, 0.0, 0.0, 0.0]]]).double()
    assert at_removal(key, value, 0.09).key.item() == 4  # 1 of 10 is more than 0.09
    assert at_removal(key, value, 0.1).key.item() == 3
    assert at_removal(key, value, 0.3).key.item() == 2
    assert at_removal(key, value, 0.0).value.item() == 1
    assert at_removal(key, value, 0.3).rate == 1 - 3 / 8


def test_rounding_costs_what_it_keeps() -> None:
    key, value = spectra(1)
    found = at_removal(key, value, 0.2, multiple=16)
    exact = at_removal(key, value, 0.2)
    assert found.unrounded == exact.rate
    assert found.cost_of_rounding == pytest.approx(exact.rate - found.rate)
    assert found.cost_of_rounding > 0


@pytest.mark.parametrize(("rate", "multiple", "rank"), [(0, 1, 32), (0.5, 1, 16), (0.3, 16, 16)])
def test_uniform_ranks(rate: float, multiple: int, rank: int) -> None:
    found = uniform(*spectra(2), rate, multiple)
    assert found.key.unique().tolist() == found.value.unique().tolist() == [rank]
    assert found.rate == 1 - rank / 32
    assert found.removal is None


def test_adaptive_ranks_lose_less_than_uniform_ones_of_the_same_rate() -> None:
    key, value = spectra(3)
    even = uniform(key, value, 0.5)
    found = at_rate(key, value, 0.5)

    def worst(kept: Tensor, singular: Tensor) -> float:
        lost = torch.arange(32) >= kept[..., None]
        return float(((singular * lost).sum(-1) / singular.sum(-1)).max())

    assert max(worst(found.key, key), worst(found.value, value)) < max(
        worst(even.key, key), worst(even.value, value)
    )


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rates_out_of_range(rate: float) -> None:
    for find in (at_rate, uniform):
        with pytest.raises(ValueError, match="share of the cache, from 0 to below 1"):
            find(*spectra(4), rate)


def test_rates_that_cannot_be_reached() -> None:
    for find in (at_rate, uniform):
        with pytest.raises(ValueError, match="cannot be reached"):
            find(*spectra(4), 0.6, 16)


def test_uniform_ranks_are_rounded_down_so_that_at_least_the_rate_goes() -> None:
    found = uniform(*spectra(2), 0.3, multiple=16)  # 22 of 32 dimensions, rounded down to 16
    assert found.key.unique().tolist() == [16]
    assert (found.rate, found.unrounded) == (0.5, 1 - 22 / 32)
    assert found.cost_of_rounding == -0.1875


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 0.99), st.sampled_from([1, 8, 16]))
def test_rounding_never_removes_less_than_uniform_was_asked_for(
    dim: int, value_dim: int, rate: float, multiple: int
) -> None:
    try:
        found = uniform(
            torch.ones(1, 1, dim).double(), torch.ones(1, 1, value_dim).double(), rate, multiple
        )
    except ValueError:
        return
    assert found.rate >= rate - 1e-9


@pytest.mark.parametrize("multiple", [1, 8, 16])
def test_no_level_is_beyond_what_ranks_can_give(
    multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def noted(key: Tensor, value: Tensor, rate: float, _: int) -> Allotment:
        asked.append(rate)
        none = torch.zeros(1, 1, dtype=torch.int64)
        return Allotment(none, none, rate, rate, rate)

    monkeypatch.setattr(rates_module, "at_rate", noted)
    for dim in range(1, 257):
        for value_dim in (dim, 64):
            asked.clear()
            levels(
                torch.ones(1, 1, dim).double(), torch.ones(1, 1, value_dim).double(), 63, multiple
            )
            most = greatest_rate(dim, value_dim, multiple)
            assert most * (1 - 1e-12) <= max(asked) <= most, (dim, value_dim)


@pytest.mark.parametrize(("dim", "multiple"), [(65, 1), (9, 8), (17, 16)])
def test_the_greatest_level_is_reached(dim: int, multiple: int) -> None:
    fall = torch.exp(-0.05 * torch.arange(dim).double())[None, None]
    most = greatest_rate(dim, dim, multiple)
    assert most * 63 / 63 > most  # in its last digit
    assert levels(fall, fall, 63, multiple)[-1] == pytest.approx(most, abs=1e-4)


def test_small_heads_have_no_levels() -> None:
    assert levels(*spectra(5, dim=16), 63, 16) == ()
