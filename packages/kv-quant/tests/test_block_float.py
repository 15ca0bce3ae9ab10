"""Block floating point: its bytes, and what it loses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_laws import coded, expect_within_bound
from kv_policy import PageLayout, TokenFormat
from kv_policy.described import described
from kv_policy.testing import check_codec
from kv_quant import LIMIT, BlockFloatCodec, IntegerCodec, OutlierCodec, reference

BITS = (8, 4, 3, 2)
FLOATS = st.one_of(
    st.floats(width=32),  # including NaN, infinities, denormals and -0.0
    st.floats(-100, 100, width=32),
    st.sampled_from([0.0, -0.0, 1.0, LIMIT, -LIMIT, 65520.0, 2.0**-126, -(2.0**-120), 1e-40]),
)


@st.composite
def cases(draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOATS):
    dim = draw(st.integers(1, 19))
    codec = BlockFloatCodec(dim, draw(st.sampled_from(BITS)), draw(st.integers(0, 7)))
    rows = draw(st.lists(st.lists(elements, min_size=dim, max_size=dim), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return codec, torch.tensor(rows, dtype=torch.float32).to(dtype)[:, None]


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_bytes_and_vectors_are_those_of_the_oracle(case):
    codec, x = case
    data, back = coded(codec, x)
    for row, vector, again in zip(
        data.tolist(), x[:, 0].double().tolist(), back[:, 0].tolist(), strict=True
    ):
        assert bytes(row).hex() == reference.encode_block_float(codec.planes, vector).hex()
        assert again == reference.decode_block_float(codec.planes, bytes(row))


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_error_is_within_the_bound(case):
    expect_within_bound(*case)


@given(cases(st.floats(-100, 100, width=32)), st.integers(-6, 6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_power_of_two_and_a_sign_change_no_magnitude(case, power):
    codec, x = case
    x = torch.where(x.float().abs() < 1e-2, 1.0, x.float())  # no step is a denormal
    back = codec.decode(codec.encode(x))
    assert torch.equal(codec.decode(codec.encode(-(2.0**power) * x)), -(2.0**power) * back)


@given(cases(st.floats(-100, 100, width=32)))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_is_decoded_is_stored_exactly(case):
    codec, x = case
    back = codec.decode(codec.encode(x))
    assert torch.equal(codec.decode(codec.encode(back)), back)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("dim", "group"), [(64, 32), (64, 0), (1, 0), (13, 4)])
def test_the_contract_holds(bits, dim, group):
    check_codec(BlockFloatCodec(dim, bits, group))


def test_outliers_are_kept_apart():
    check_codec(OutlierCodec(BlockFloatCodec(64, 4, 16), 1))


def test_bytes_by_hand():
    """1 to 2 has the exponent 127 and, in 4 bits, steps of a quarter: codes 8 + 4, 0, -5, 7."""
    codec = BlockFloatCodec(4, 4, 4)
    data = codec.encode(torch.tensor([[[1.0, 0.1, -1.3, 1.99]]]))
    assert bytes(data[0].tolist()).hex() == "3cf8" + "7f"
    assert codec.decode(data)[0, 0].tolist() == [1.0, 0.0, -1.25, 1.75]


def test_eight_bits_in_groups_of_32_are_mxint8():
    """An element is a multiple of 2**-6 times the power of two of the group's largest."""
    x = torch.randn(50, 1, 64, generator=torch.Generator().manual_seed(0))
    codec = BlockFloatCodec(64, 8, 32)
    assert codec.parts == (64, 2)
    back = codec.decode(codec.encode(x)).view(50, 2, 32)
    for found, given_ in zip(back.flatten(0, 1), x.view(100, 32), strict=True):
        unit = 2.0 ** (math.floor(math.log2(given_.abs().max())) - 6)
        expected = (given_ / unit).round().clamp(-127, 127) * unit
        assert torch.equal(found, expected)


def test_scales_take_a_quarter_of_the_bytes():
    even, powers = IntegerCodec(64, 4, 16), BlockFloatCodec(64, 4, 16)
    assert even.parts == (32, 16)
    assert powers.parts == (32, 4)


def test_kernels_leave_it_to_its_own_code():
    codec = BlockFloatCodec(64, 4, 32)
    declined = described(PageLayout.sized(TokenFormat(codec, codec), 16), blocks=True).declined
    assert declined is not None
    assert "is read and written by its own code" in declined


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64, 1), "bits is 1; a mantissa has 8, 4, 3 or 2 bits"),
        ((0, 4), "dim is 0; a vector has at least 1 element"),
        ((8, 4, -2), "group is -2; use elements per exponent, or 0 for all"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        BlockFloatCodec(*sizes)


def test_other_shapes_are_refused():
    codec = BlockFloatCodec(8, 4)
    with pytest.raises(ValueError, match=r"\(2, 1, 7\); expected n, 1, 8"):
        codec.encode(torch.zeros(2, 1, 7))
    with pytest.raises(ValueError, match="a row has 7 bytes; a vector of this codec has 5"):
        codec.decode(torch.zeros(2, 7, dtype=torch.uint8))
