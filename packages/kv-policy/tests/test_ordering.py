"""Orders of scores on a CPU, compared with the stable sorts of torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_policy import ascending, ascending_order, best

FEW = st.sampled_from([-torch.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0 + 2**-20, torch.inf])
ANY = st.floats(width=32)  # NaN as well
SHAPES = st.tuples(st.integers(0, 3), st.integers(0, 9))


@st.composite
def scores(draw):
    """Few values, so that many are equal, or any."""
    rows, places = draw(SHAPES)
    values = draw(st.sampled_from([FEW, ANY]))
    numbers = draw(st.lists(values, min_size=rows * places, max_size=rows * places))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    return torch.tensor(numbers, dtype=dtype).view(rows, places)


def ranks(score):
    """The place of each score among those of its row, the highest first."""
    return score.argsort(dim=-1, descending=True, stable=True).argsort(-1)


@given(scores(), st.data())
def test_the_best_are_those_of_a_stable_sort(score, data):
    some = st.integers(-2, score.shape[1] + 2)
    counts = data.draw(st.lists(some, min_size=len(score), max_size=len(score)))
    count = torch.tensor(counts, dtype=torch.long)
    assert torch.equal(best(score, count), ranks(score) < count[:, None])


@given(scores())
def test_rows_are_sorted(score):
    found = ascending(score)
    assert found.dtype == score.dtype
    torch.testing.assert_close(found, score.sort(-1).values, rtol=0, atol=0, equal_nan=True)


@given(scores())
def test_equal_scores_keep_their_order(score):
    assert torch.equal(ascending_order(score), score.argsort(dim=-1, stable=True))


@pytest.mark.parametrize("places", [300, 5000])
def test_long_rows(places):
    score = torch.randn(4, 3, places, generator=torch.Generator().manual_seed(0))
    score = torch.cat((score, score.round()), -1)  # half of them with many equals
    count = torch.arange(12).view(4, 3) * places // 6
    assert torch.equal(best(score, count), ranks(score) < count[..., None])
    assert torch.equal(ascending_order(score), score.argsort(dim=-1, stable=True))


def test_neither_gradients_nor_the_scores_change():
    score = torch.randn(2, 9, requires_grad=True)
    before = score.detach().clone()
    order = ascending_order(score.mT)
    assert torch.equal(order, before.mT.argsort(dim=-1, stable=True))
    assert not ascending(score).requires_grad
    assert torch.equal(score, before)
