"""Codebooks for rotated coordinates: their levels, their bytes, and what they lose."""

import math
import struct
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_laws import coded, expect_within_bound
from kv_policy import Codec, PageLayout, PlaneLayout, TokenFormat
from kv_policy.described import described
from kv_policy.testing import check_codec
from kv_quant import LIMIT, CodebookCodec, IntegerCodec, reference
from kv_quant.codebook import LEVELS

BITS = (4, 3, 2, 1)
FLOATS = st.one_of(
    st.floats(width=32),  # including NaN, infinities, denormals and -0.0
    st.floats(-100, 100, width=32),
    st.sampled_from([0.0, -0.0, 1.0, LIMIT, -LIMIT, 65520.0, 2.0**-24, -(2.0**-25), 1e-40]),
)


@st.composite
def cases(draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOATS):
    codec = CodebookCodec(draw(st.integers(1, 19)), draw(st.sampled_from(BITS)))
    vector = st.lists(elements, min_size=codec.dim, max_size=codec.dim)
    rows = draw(st.lists(vector, min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return codec, torch.tensor(rows, dtype=torch.float32).to(dtype)[:, None]


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize("bits", BITS)
def test_a_level_is_the_mean_of_the_normal_numbers_that_are_nearest_to_it(bits):
    levels = LEVELS[bits]
    assert len(levels) == 2**bits
    bounds = [-40.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
    for level, (low, high) in zip(levels, pairwise(bounds), strict=True):
        mean = (density(low) - density(high)) / (below(high) - below(low))
        assert level == pytest.approx(mean, abs=2e-7)


@given(cases())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_bytes_and_vectors_are_those_of_the_oracle(case):
    codec, x = case
    data, back = coded(codec, x)
    levels = LEVELS[codec.bits]
    for row, vector, again in zip(
        data.tolist(), x[:, 0].double().tolist(), back[:, 0].tolist(), strict=True
    ):
        assert bytes(row).hex() == reference.encode_levels(codec.planes, levels, vector).hex()
        assert again == reference.decode_levels(codec.planes, levels, bytes(row))


@given(cases())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_error_is_within_the_bound(case):
    expect_within_bound(*case)


@given(cases(st.floats(-100, 100, width=32)), st.integers(-6, 6))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_vector_times_a_power_of_two_has_the_same_codes(case, power):
    codec, x = case
    x = torch.where(x.float().abs() < 1e-2, 1.0, x.float())  # no scale is a denormal
    stride = codec.parts[0]
    assert torch.equal(codec.encode(x)[:, :stride], codec.encode(x * 2.0**power)[:, :stride])
    assert torch.equal(codec.decode(codec.encode(x * 2.0**power)), _scaled(codec, x, power))


def _scaled(codec: CodebookCodec, x: torch.Tensor, power: int) -> torch.Tensor:
    return codec.decode(codec.encode(x)) * 2.0**power


@pytest.mark.parametrize("bits", BITS)
def test_normal_coordinates_lose_less_than_in_even_steps_of_more_bytes(bits):
    x = torch.randn(2000, 1, 128, generator=torch.Generator().manual_seed(0))
    lost, size = {}, {}
    for codec in (CodebookCodec(128, bits), IntegerCodec(128, bits)):
        kind = type(codec).__name__
        lost[kind] = (codec.decode(codec.encode(x)) - x).square().mean().item()
        size[kind] = sum(codec.parts)
    assert lost["CodebookCodec"] < lost["IntegerCodec"]
    assert size["CodebookCodec"] == size["IntegerCodec"] - 2


@pytest.mark.parametrize(("bits", "known"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_the_loss_of_normal_coordinates_is_that_of_the_quantizer(bits, known):
    x = torch.randn(4000, 1, 128, generator=torch.Generator().manual_seed(1))
    codec = CodebookCodec(128, bits)
    lost = (codec.decode(codec.encode(x)) - x).square().mean().item()
    assert lost == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 1, 13])
def test_the_contract_holds(bits, dim):
    check_codec(CodebookCodec(dim, bits))


@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_codes_and_a_scale(bits):
    codec = CodebookCodec(64, bits)
    assert codec.parts == (8 * bits, 2)
    data = codec.encode(torch.full((1, 1, 64), -3.0))
    assert data[0, -2:].view(torch.float16).item() == 3.0


@pytest.mark.parametrize("bits", BITS)
def test_kernels_without_tables_leave_it_to_its_own_code(bits):
    codec = CodebookCodec(64, bits)
    page = PageLayout.sized(TokenFormat(codec, codec), tokens=16)
    declined = described(page).declined
    assert declined is not None
    assert "is read and written by its own code" in declined


@pytest.mark.parametrize(
    "layout",
    [
        PlaneLayout(64, 4, 32, levels=LEVELS[4]),
        PlaneLayout(64, 4, 64, 2, levels=LEVELS[4]),
        PlaneLayout(64, 8, 64, levels=tuple(float(i) for i in range(256))),
    ],
    ids=["several scales", "shared scales", "256 levels"],
)
def test_kernels_with_tables_leave_other_codebooks_to_their_own_code(layout):
    codec = Other(layout)
    assert isinstance(codec, Codec)
    page = PageLayout.sized(TokenFormat(codec, codec), tokens=16)
    assert "is read and written by its own code" in (described(page, planes=True).declined or "")


@dataclass(frozen=True)
class Other:
    layout: PlaneLayout
    dim = 64

    @property
    def block(self):
        return self.layout.tokens

    @property
    def parts(self):
        return self.layout.parts

    def encode(self, x):
        raise NotImplementedError

    decode = bound = encode


@pytest.mark.parametrize("bits", BITS)
def test_kernels_with_tables_have_its_levels(bits):
    codec = CodebookCodec(64, bits)
    page = PageLayout.sized(TokenFormat(codec, IntegerCodec(64, 3)), tokens=16)
    found = described(page, planes=True)
    assert found.declined is None
    assert found.formats == (4, 64, bits, 64, 0, 64, 3, 64)
    assert struct.unpack(f"={2**bits}d", struct.pack(f"={2**bits}q", *found.levels)) == LEVELS[bits]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64, 8), "bits is 8; a codebook has codes of 4, 3, 2 or 1 bits"),
        ((0, 4), "dim is 0; a vector has at least 1 element"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        CodebookCodec(*sizes)


def test_other_shapes_are_refused():
    codec = CodebookCodec(8, 4)
    with pytest.raises(ValueError, match=r"\(2, 1, 7\); expected n, 1, 8"):
        codec.encode(torch.zeros(2, 1, 7))
    with pytest.raises(ValueError, match="a row has 7 bytes; a vector of this codec has 6"):
        codec.decode(torch.zeros(2, 7, dtype=torch.uint8))
