import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_laws import coded, expect_within_bound
from kv_policy import BitLayout, PlaneLayout
from kv_policy.testing import check_codec
from kv_quant import LIMIT, IntegerCodec, reference

BITS = (8, 4, 3, 2, 1)
FLOATS = st.one_of(
    st.floats(width=32),  # including NaN, infinities, denormals and -0.0
    st.floats(-100, 100, width=32),
    st.floats(-(2.0**-14), 2.0**-14, width=32),  # the denormals of float16
    st.sampled_from(
        [0.0, -0.0, 1.0, LIMIT, -LIMIT, 65504.0, 65520.0, 2.0**-24, -(2.0**-25), 1e-40]
    ),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def cases(draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOATS):
    dim = draw(st.integers(1, 19))
    codec = IntegerCodec(dim, draw(st.sampled_from(BITS)), draw(st.integers(0, dim + 2)))
    shift = draw(st.sampled_from([0.0, 0.0, 5.0, -1000.0]))  # an offset costs bits of the zero
    vector = st.lists(elements, min_size=dim, max_size=dim)
    rows = draw(st.lists(vector, min_size=1, max_size=4))
    x = torch.tensor(rows, dtype=torch.float32).add(shift).to(draw(DTYPES))
    return codec, x[:, None]


def normal(n: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, 1, dim, dtype=dtype)


@given(cases())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_bytes_are_those_of_the_oracle(case):
    codec, x = case
    data = codec.encode(x)
    assert data.dtype == torch.uint8
    assert data.shape == (len(x), sum(codec.parts))
    for row, vector in zip(data, x[:, 0].double().tolist(), strict=True):
        assert bytes(row.tolist()).hex() == reference.encode(codec.planes, [vector]).hex()


@given(cases())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_decoding_is_that_of_the_oracle(case):
    codec, x = case
    data, back = coded(codec, x)
    for row, vector in zip(data, back[:, 0].tolist(), strict=True):
        assert [vector] == reference.decode(codec.planes, bytes(row.tolist()))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [0, 16, 24])
def test_many_normal_vectors_agree_with_the_oracle(bits, group):
    codec = IntegerCodec(64, bits, group)
    x = normal(50, 64, torch.bfloat16) * torch.logspace(-3, 2, 50).bfloat16()[:, None, None]
    rows = zip(codec.encode(x).tolist(), x[:, 0].double().tolist(), strict=True)
    assert all(bytes(row) == reference.encode(codec.planes, [vector]) for row, vector in rows)


@given(cases())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_error_is_within_the_bound(case):
    expect_within_bound(*case)


@given(cases(st.floats(-3e4, 3e4, width=32)))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_bound_is_half_a_scale_of_the_span(case):
    # the documented bound, computed from the elements alone
    codec, x = case
    codec = IntegerCodec(codec.dim, codec.bits)
    for vector, bound in zip(x[:, 0].double().tolist(), codec.bound(x)[:, 0].tolist(), strict=True):
        largest = max(abs(e) for e in vector)
        step = 2.0 ** max(math.frexp(largest)[1] - 11, -24)
        scale = (max(vector) - min(vector) + step) / (2**codec.bits - 1)
        limit = max(scale * (1 + 2**-10) / 2 + 2**-25, step / 2) + 2**-18 * largest
        assert max(bound) <= limit


def test_bound_is_reached():
    # the least, the greatest, and one element next to the midpoint of two codes
    for bits in BITS:
        codec = IntegerCodec(3, bits)
        top = 2**bits - 1
        x = torch.tensor([[[0.0, float(top), 0.499]]])
        error = (codec.decode(codec.encode(x)) - x).abs()
        assert error.max() > 0.99 * codec.bound(x).max()


@given(cases(), st.integers(0, 3))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_vector_does_not_change_another(case, which):
    codec, x = case
    alone = torch.cat([codec.encode(vector[None]) for vector in x])
    assert torch.equal(codec.encode(x), alone)
    dirty = x.clone()
    dirty[which % len(x)] = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(codec.dim)[
        : codec.dim
    ]
    others = torch.arange(len(x)) != which % len(x)
    assert torch.equal(codec.encode(dirty)[others], alone[others])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 2, 5, 64])
@pytest.mark.parametrize(
    "constant", [0.0, -0.0, 1.0, -3.1415927, 0.1, 1000.3, -30001.0, 6e-8, 1e-9, -1e-9, 1e-40]
)
def test_constant_vectors_decode_to_their_float16(bits, dim, constant):
    codec = IntegerCodec(dim, bits)
    x = torch.full((2, 1, dim), constant)
    data = codec.encode(x)
    assert torch.equal(codec.decode(data), x.half().float())
    assert not data[:, : codec.parts[0]].any()


@pytest.mark.parametrize("bits", BITS)
def test_a_flat_group_beside_others(bits):
    codec = IntegerCodec(6, bits, group=2)
    x = torch.tensor([[[5.0, 5.0, -1.0, 1.0, 0.0, 0.0]]])
    back = codec.decode(codec.encode(x))
    assert torch.equal(back[..., [0, 1, 4, 5]], x[..., [0, 1, 4, 5]])
    assert ((back - x).abs() <= codec.bound(x)).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_not_finite_is_clamped_and_nan_is_zero(bits, dtype):
    codec = IntegerCodec(3, bits)
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[inf, -inf, inf], [inf, inf, inf], [nan, nan, nan], [nan, 1.0, 0.0]])
    expected = [[LIMIT, -LIMIT, LIMIT], [LIMIT] * 3, [0.0] * 3, [0.0, 1.0, 0.0]]
    back = codec.decode(codec.encode(x.to(dtype)[:, None]))[:, 0]
    assert torch.allclose(back, torch.tensor(expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_values_beyond_the_range_are_clamped_and_decode_to_finite_float16(bits):
    codec = IntegerCodec(4, bits)
    x = torch.tensor([[[40000.0, -70000.0, 1e30, 0.0]], [[-3e38, -65504.0, 33000.0, 32000.0]]])
    clamped = x.clamp(-LIMIT, LIMIT)
    assert torch.equal(codec.encode(x), codec.encode(clamped))
    back = codec.decode(codec.encode(x))
    assert back.half().isfinite().all()
    assert ((back - x).abs() <= codec.bound(x)).all()


def test_a_wide_float64_is_rounded_to_float32():
    codec = IntegerCodec(2, 8)
    x = torch.tensor([[[1 + 1e-9, 1e300]]], dtype=torch.float64)
    assert ((codec.decode(codec.encode(x)).double() - x).abs() <= codec.bound(x)).all()


@pytest.mark.parametrize("bits", BITS)
def test_float16_denormals(bits):
    codec = IntegerCodec(16, bits)
    x = (torch.arange(16) * 2.0**-24).view(1, 1, 16)  # every float16 from 0 to 15 * 2**-24
    if bits >= 4:
        assert torch.equal(codec.decode(codec.encode(x)), x)
    tiny = torch.tensor([1e-45, 2e-42, 1e-40, 0.0] * 4).view(1, 1, 16)
    assert codec.decode(codec.encode(tiny)).abs().max() == 0


def test_negative_zero_is_zero():
    codec = IntegerCodec(4, 4)
    x = torch.tensor([[[0.0, -0.0, 0.0, -0.0]]])
    assert not codec.encode(x).any()
    assert not torch.signbit(codec.decode(codec.encode(x))).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("dim", "group"), [(64, 0), (64, 16), (1, 0), (13, 0), (13, 5)])
def test_the_contract_holds(bits, dim, group):
    check_codec(IntegerCodec(dim, bits, group))


def test_the_input_is_left_alone():
    x = torch.tensor([[[torch.nan, torch.inf, -0.0, 1.0]]])
    before = x.clone()
    IntegerCodec(4, 8).encode(x)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_inputs_and_bytes_may_be_slices():
    codec = IntegerCodec(5, 8)  # five bytes of codes, so the scale starts at an odd one
    x = normal(4, 10)[:, :, ::2]
    data = codec.encode(x)
    assert torch.equal(data, codec.encode(x.clone()))
    page = torch.zeros(3 + data.numel(), dtype=torch.uint8)
    page[3:] = data.flatten()
    assert torch.equal(codec.decode(page[3:].view(4, -1)), codec.decode(data))
    assert torch.equal(codec.decode(page[3:].view(4, -1)[:1]), codec.decode(data)[:1])


@given(st.integers(1, 300), st.sampled_from(BITS), st.integers(0, 40))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_codes_take_their_bits_and_less_than_a_byte_more_per_plane(dim, bits, group):
    codec = IntegerCodec(dim, bits, group)
    planes = 2 if bits == 3 else 1
    spare = 8 * codec.parts[0] - dim * bits
    assert 0 <= spare < 8 * planes
    assert dim % 8 or spare == 0
    assert codec.parts[1] == 4 * -(-dim // (group or dim))
    places = [codec.planes.place(d, bit) for d in range(dim) for bit in range(bits)]
    assert len(set(places)) == len(places)
    assert all(byte < codec.parts[0] and bit < 8 for byte, bit in places)


@pytest.mark.parametrize("bits", BITS)
def test_codes_of_3_bits_alone_are_in_two_planes(bits):
    layout = IntegerCodec(64, bits, 16).layout
    assert isinstance(layout, PlaneLayout if bits == 3 else BitLayout)
    assert (layout.dim, layout.bits, layout.group, layout.tokens) == (64, bits, 16, 1)


def test_no_vectors():
    codec = IntegerCodec(5, 4, group=2)
    data = codec.encode(torch.empty(0, 1, 5))
    assert data.shape == (0, sum(codec.parts))
    assert codec.decode(data).shape == (0, 1, 5)


def test_a_group_as_long_as_the_vector_or_longer_is_the_whole_vector():
    x = normal(3, 6)
    whole = IntegerCodec(6, 4).encode(x)
    assert torch.equal(IntegerCodec(6, 4, 6).encode(x), whole)
    assert torch.equal(IntegerCodec(6, 4, 32).encode(x), whole)


def test_smaller_groups_are_closer():
    x = normal(200, 64) * torch.logspace(-1, 1, 64)
    errors = [
        (codec.decode(codec.encode(x)) - x).square().mean().item()
        for codec in (IntegerCodec(64, 4, group) for group in (0, 32, 16, 8))
    ]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64, 5, 0), "bits is 5; an integer code has 8, 4, 3, 2 or 1"),
        ((0, 4, 0), "dim is 0; a vector has at least 1 element"),
        ((64, 4, -1), "group is -1; use elements per scale, or 0 for all"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        IntegerCodec(*sizes)


def test_other_shapes_are_refused():
    codec = IntegerCodec(8, 4)
    with pytest.raises(ValueError, match=r"\(2, 1, 7\); expected n, 1, 8"):
        codec.encode(torch.zeros(2, 1, 7))
    with pytest.raises(ValueError, match="a row has 7 bytes; a vector of this codec has 8"):
        codec.decode(torch.zeros(2, 7, dtype=torch.uint8))
