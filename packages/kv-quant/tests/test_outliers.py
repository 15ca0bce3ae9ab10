"""Outliers kept apart: their bytes, the range of the others, and what is left of the error."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_laws import coded, expect_within_bound
from kv_policy import PageLayout, TokenFormat
from kv_policy.described import described
from kv_policy.testing import check_codec
from kv_quant import LIMIT, ChannelCodec, CodebookCodec, IntegerCodec, OutlierCodec, reference
from kv_quant.codebook import LEVELS

FLOATS = st.one_of(
    st.floats(width=32),  # including NaN, infinities, denormals and -0.0
    st.floats(-100, 100, width=32),
    st.sampled_from([0.0, -0.0, 1.0, LIMIT, -LIMIT, 65520.0, 2.0**-24, -(2.0**-25), 1e-40]),
)


def inner(dim: int, bits: int, group: int) -> IntegerCodec | CodebookCodec:
    """A codec of even steps, or a codebook where `group` is negative."""
    return CodebookCodec(dim, bits) if group < 0 else IntegerCodec(dim, bits, group)


@st.composite
def cases(draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOATS):
    dim = draw(st.integers(2, 12))
    sizes = dim, draw(st.sampled_from((4, 3, 2, 1))), draw(st.integers(-1, 5))
    count = draw(st.integers(1, dim - 1))
    rows = draw(st.lists(st.lists(elements, min_size=dim, max_size=dim), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return sizes, count, torch.tensor(rows, dtype=torch.float32).to(dtype)[:, None]


def made(case: tuple[tuple[int, int, int], int, torch.Tensor]) -> tuple[OutlierCodec, torch.Tensor]:
    sizes, count, x = case
    return OutlierCodec(inner(*sizes), count), x


def expected(codec: OutlierCodec, vector: list[float]) -> tuple[bytes, list[float]]:
    each = codec.each
    if isinstance(each, CodebookCodec):
        planes, levels = each.planes, LEVELS[each.bits]
        data = reference.encode_outliers(
            lambda x: reference.encode_levels(planes, levels, x), vector, codec.count
        )
        back = reference.decode_outliers(
            lambda x: reference.decode_levels(planes, levels, x), data, codec.dim, codec.count
        )
        return data, back
    assert isinstance(each, IntegerCodec)
    planes = each.planes
    data = reference.encode_outliers(lambda x: reference.encode(planes, [x]), vector, codec.count)
    back = reference.decode_outliers(
        lambda x: reference.decode(planes, x)[0], data, codec.dim, codec.count
    )
    return data, back


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_bytes_and_vectors_are_those_of_the_oracle(case):
    codec, x = made(case)
    data, back = coded(codec, x)
    for row, vector, again in zip(
        data.tolist(), x[:, 0].double().tolist(), back[:, 0].tolist(), strict=True
    ):
        stored, decoded = expected(codec, vector)
        assert bytes(row).hex() == stored.hex()
        assert again == decoded


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_error_is_within_the_bound(case):
    expect_within_bound(*made(case))


@given(cases(st.integers(-20, 20).map(float)))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_other_choice_of_outliers_leaves_a_smaller_range(case):
    codec, x = made(case)
    first = sum(codec.each.parts)
    for row, vector in zip(codec.encode(x), x[:, 0].tolist(), strict=True):
        apart = row[first : first + codec.count].tolist()
        assert len(set(apart)) == codec.count

        def span(out: tuple[int, ...], vector: list[float] = vector) -> float:
            rest = [element for d, element in enumerate(vector) if d not in out]
            return max(rest) - min(rest)

        assert span(tuple(apart)) == min(map(span, combinations(range(codec.dim), codec.count)))


@given(cases(st.floats(-100, 100, width=16)), st.sampled_from([1e3, -3e4]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_one_more_spike_changes_nothing_else(case, spike):
    """An element beyond all others is exact, and the others are as if it were one of them."""
    sizes, _, x = case
    codec = OutlierCodec(inner(*sizes), 1)
    spiked = x.float().clone()
    spiked[:, :, 0] = spike
    level = spiked[:, :, 1:].amax(-1) if spike > 0 else spiked[:, :, 1:].amin(-1)
    without = torch.cat([level[..., None], spiked[:, :, 1:]], dim=-1)
    back = codec.decode(codec.encode(spiked))
    assert (back[:, :, 0] == torch.tensor(spike).half()).all()
    plain = codec.each.decode(codec.each.encode(without))
    assert torch.equal(back[:, :, 1:], plain[:, :, 1:])


@pytest.mark.parametrize("group", [0, 16, -1])
@pytest.mark.parametrize(("dim", "count"), [(64, 1), (13, 3), (2, 1), (300, 2)])
def test_the_contract_holds(dim, count, group):
    check_codec(OutlierCodec(inner(dim, 4, group), count))


@pytest.mark.parametrize("dim", [256, 257, 576])
def test_an_index_beyond_a_byte_has_two(dim):
    codec = OutlierCodec(IntegerCodec(dim, 4), 2)
    x = torch.zeros(1, 1, dim)
    x[0, 0, dim - 1], x[0, 0, 3] = 7.0, -9.0
    assert codec.parts == (*codec.each.parts, 2 if dim == 256 else 4, 4)
    assert torch.equal(codec.decode(codec.encode(x)), x)


@pytest.mark.parametrize("dim", [5, 300])
def test_any_bytes_are_decoded(dim):
    """Empty slots of a page are decoded with the others, whatever they hold."""
    codec = OutlierCodec(IntegerCodec(dim, 4), 2)
    data = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, sum(codec.parts))
    assert codec.decode(data).shape == (256, 1, dim)


def test_bytes_by_hand():
    """Of 1 2 3 4 90 the range is least without 90: codes 0 5 10 15 15 of scale 0.2 and zero 1."""
    codec = OutlierCodec(IntegerCodec(5, 4), 1)
    data = bytes(codec.encode(torch.tensor([[[1.0, 2.0, 3.0, 4.0, 90.0]]]))[0].tolist())
    assert data.hex() == "f0f50a" + "6732003c" + "04" + "a055"


@pytest.mark.parametrize("bits", [4, 3])
def test_vectors_with_one_large_channel_lose_less_than_in_groups_of_as_many_bytes(bits):
    x = torch.randn(500, 1, 64, generator=torch.Generator().manual_seed(0))
    x[..., 11] *= 30
    lost, size = [], []
    for codec in (OutlierCodec(IntegerCodec(64, bits), 1), IntegerCodec(64, bits, 32)):
        lost.append((codec.decode(codec.encode(x)) - x).square().mean().item())
        size.append(sum(codec.parts))
    assert lost[0] < lost[1] / 10
    assert size[0] == size[1] - 1


def test_kernels_leave_it_to_its_own_code():
    codec = OutlierCodec(IntegerCodec(64, 4), 1)
    for pair in ((codec, IntegerCodec(64, 4)), (IntegerCodec(64, 4), codec)):
        page = PageLayout.sized(TokenFormat(*pair), tokens=16)
        declined = described(page, blocks=True).declined
        assert declined is not None
        assert "is read and written by its own code" in declined


@pytest.mark.parametrize("count", [0, -1, 8, 9])
def test_impossible_counts_are_refused(count):
    with pytest.raises(ValueError, match=f"count is {count}; keep at least 1 outlier .* its 8 el"):
        OutlierCodec(IntegerCodec(8, 4), count)


def test_codecs_of_blocks_are_refused():
    with pytest.raises(ValueError, match="encodes 4 tokens together; outliers are kept apart in"):
        OutlierCodec(ChannelCodec(8, 4, 4), 1)


def test_other_shapes_are_refused():
    codec = OutlierCodec(IntegerCodec(8, 4), 1)
    with pytest.raises(ValueError, match=r"\(2, 1, 7\); expected n, 1, 8"):
        codec.encode(torch.zeros(2, 1, 7))
    with pytest.raises(ValueError, match="a row has 7 bytes; a vector of this codec has 11"):
        codec.decode(torch.zeros(2, 7, dtype=torch.uint8))
