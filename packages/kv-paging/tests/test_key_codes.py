"""Codes of keys, compared with their definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from key_code_reference import check_codes, codes_in, rotated
from kv_paging.key_codes import codes_of
from kv_policy.key_codes import code_bytes


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 99),
    st.sampled_from([1, 3, 4, 17, 64, 80, 128]),
    st.sampled_from([1, 3, 16, 20]),
    st.sampled_from([1e-3, 1.0, 300.0]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_codes_are_those_of_the_definition(seed, dim, tokens, size, dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    key = (size * torch.randn(3, tokens, dim, generator=g)).to(dtype)
    found = codes_of(key, torch.ones(3, tokens, dtype=torch.bool))
    assert found.shape == (3, code_bytes(dim, tokens))
    for page, keys in zip(found, key, strict=True):
        check_codes(page, keys)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.sampled_from([64, 128]))
def test_a_key_is_near_its_codes(seed, dim) -> None:
    """A normal number in two bits has about an eighth of its variance as an error."""
    g = torch.Generator().manual_seed(seed)
    key = torch.randn(1, 64, dim, generator=g)
    key[:, :, 3] += 20  # an outlier, which the rotation spreads
    (page,) = codes_of(key, torch.ones(1, 64, dtype=torch.bool))
    codes, scales = codes_in(page, 64, dim)
    x = rotated(key[0])
    error = (2 * codes - 3) * scales[:, None] - x
    assert error.square().sum() / x.square().sum() < 0.3


def test_empty_slots_have_the_codes_of_a_key_in_their_page() -> None:
    key = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(0))
    held = torch.tensor([[False, True, False, True, False], [False] * 5])
    given = key.masked_fill(~held[..., None], torch.nan)
    first, nothing = codes_of(given, held)
    check_codes(first, key[0, [1, 1, 1, 3, 1]])
    assert codes_in(nothing, 5, 20)[1].tolist() == [0] * 5


@pytest.mark.parametrize("x", [0.0, 1e-30, 65504.0, torch.inf, -torch.inf, torch.nan])
def test_scales_are_finite(x: float) -> None:
    key = torch.full((1, 2, 64), x)
    key[:, 1, 5:] = 0
    (page,) = codes_of(key, torch.ones(1, 2, dtype=torch.bool))
    scales = codes_in(page, 2, 64)[1]
    assert scales.isfinite().all()
    if x == x and abs(x) > 1:
        check_codes(page, key[0])
