"""Orthogonal matrices of every order, with elements of about equal magnitude."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_policy.orthogonal import hadamard, spreading


@given(order=st.integers(1, 260))
@settings(max_examples=60, deadline=None)
def test_rows_are_orthonormal_and_no_element_is_large(order: int) -> None:
    found = spreading(order)
    torch.testing.assert_close(found @ found.mT, torch.eye(order, dtype=torch.float64))
    assert found.abs().max() <= (2 / order) ** 0.5 + 1e-12


@pytest.mark.parametrize(
    "order", [1, 2, 4, 12, 20, 28, 36, 64, 72, 80, 96, 112, 128, 192, 256, 576]
)
def test_orders_of_heads_in_use_have_a_hadamard_matrix(order: int) -> None:
    found = hadamard(order)
    assert found is not None
    assert found.abs().unique().tolist() == [1]
    assert torch.equal(found @ found.mT, order * torch.eye(order, dtype=torch.long))
    torch.testing.assert_close(spreading(order), found.double() / order**0.5)


@pytest.mark.parametrize("order", [3, 5, 6, 10, 33, 90])
def test_no_hadamard_matrix_has_another_order(order: int) -> None:
    assert hadamard(order) is None


@pytest.mark.parametrize("order", [0, -4])
def test_an_order_that_is_not_positive_is_refused(order: int) -> None:
    with pytest.raises(ValueError, match="the order is 1 or more"):
        spreading(order)
