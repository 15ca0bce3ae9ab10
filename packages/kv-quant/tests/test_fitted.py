"""Levels of a vector's range: their bytes, and what they lose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_laws import coded, expect_within_bound
from fitted_cases import levels_of
from kv_policy import PageLayout, TokenFormat
from kv_policy.described import described
from kv_policy.testing import check_codec
from kv_quant import LIMIT, IntegerCodec, LevelsCodec, OutlierCodec, reference
from kv_quant.fitted import BITS

FLOATS = st.one_of(
    st.floats(width=32),  # including NaN, infinities, denormals and -0.0
    st.floats(-100, 100, width=32),
    st.sampled_from([0.0, -0.0, 1.0, LIMIT, -LIMIT, 65520.0, 2.0**-24, -(2.0**-25), 1e-40]),
)


@st.composite
def levels(draw: st.DrawFn, bits: int) -> tuple[float, ...]:
    top = 2**bits - 1
    each = st.integers(0, 128 * top)
    found = draw(st.lists(each, min_size=top + 1, max_size=top + 1, unique=True))
    return tuple(level / 128 for level in sorted(found))


@st.composite
def cases(draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOATS):
    dim, bits = draw(st.integers(1, 19)), draw(st.sampled_from(BITS))
    vector = st.lists(elements, min_size=dim, max_size=dim)
    rows = draw(st.lists(vector, min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    x = torch.tensor(rows, dtype=torch.float32).to(dtype)[:, None]
    return (dim, bits, draw(levels(bits))), x  # of which a codec is made outside of the strategy


@given(cases())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_bytes_and_vectors_are_those_of_the_oracle(case):
    codec, x = LevelsCodec(*case[0]), case[1]
    data, back = coded(codec, x)
    for row, vector, again in zip(
        data.tolist(), x[:, 0].double().tolist(), back[:, 0].tolist(), strict=True
    ):
        found = reference.encode_fitted(codec.planes, codec.levels, vector)
        assert bytes(row).hex() == found.hex()
        assert again == reference.decode_fitted(codec.planes, codec.levels, bytes(row))


@given(cases())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_error_is_within_the_bound(case):
    expect_within_bound(LevelsCodec(*case[0]), case[1])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 1, 13])
def test_the_contract_holds(bits, dim):
    check_codec(LevelsCodec(dim, bits, levels_of(bits, 1.5)))


@pytest.mark.parametrize("bits", BITS)
def test_even_levels_are_even_steps(bits):
    """But for elements halfway between two codes."""
    even = LevelsCodec(48, bits, tuple(float(code) for code in range(2**bits)))
    x = torch.randn(200, 1, 48, generator=torch.Generator().manual_seed(bits)) + 0.5
    codec = IntegerCodec(48, bits)
    assert even.parts == codec.parts
    assert torch.equal(even.encode(x), codec.encode(x))
    torch.testing.assert_close(even.decode(even.encode(x)), codec.decode(codec.encode(x)))


def test_other_levels_have_another_digest():
    one, two = (LevelsCodec(8, 2, levels_of(2, bend)) for bend in (1.0, 2.0))
    plain = IntegerCodec(8, 2)
    assert OutlierCodec(one, 1).digest == one.digest != two.digest
    assert OutlierCodec(plain, 1).digest is None
    assert TokenFormat(plain, plain).digest is None
    pairs = ((one, plain), (plain, one), (two, plain), (one, two))
    assert len({TokenFormat(*pair).digest for pair in pairs}) == len(pairs)


def test_kernels_leave_it_to_its_own_code():
    codec = LevelsCodec(64, 4, levels_of(4, 1.5))
    page = PageLayout.sized(TokenFormat(codec, codec), tokens=16)
    found = described(page, planes=True).declined
    assert "is read and written by its own code" in (found or "")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64, 8, (0.0, 1.0)), "bits is 8; levels have codes of 4, 3, 2 or 1 bits"),
        ((0, 1, (0.0, 1.0)), "dim is 0; a vector has at least 1 element"),
        ((8, 1, (0.0, 0.5, 1.0)), "codes of 1 bits have 2, ascending"),
        ((8, 1, (0.5, 0.5)), "codes of 1 bits have 2, ascending"),
        ((8, 1, (0.5, float("nan"))), "codes of 1 bits have 2, ascending"),
        ((8, 1, (0.5, 1.5)), "in units of the scale they are from 0 to 1"),
        ((8, 1, (-0.5, 0.5)), "in units of the scale they are from 0 to 1"),
    ],
)
def test_what_is_no_codec_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        LevelsCodec(*sizes)


def test_other_shapes_are_refused():
    codec = LevelsCodec(8, 4, levels_of(4, 1.0))
    with pytest.raises(ValueError, match=r"\(2, 1, 7\); expected n, 1, 8"):
        codec.encode(torch.zeros(2, 1, 7))
    with pytest.raises(ValueError, match="a row has 7 bytes; a vector of this codec has 8"):
        codec.decode(torch.zeros(2, 7, dtype=torch.uint8))
