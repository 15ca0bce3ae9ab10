"""Block codecs: keys per channel and values per token, several tokens encoded together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_laws import coded, expect_within_bound
from kv_policy import Codec, TokenFormat
from kv_policy.testing import check_codec
from kv_quant import LIMIT, ChannelCodec, IntegerCodec, RowsCodec, reference

BITS = (8, 4, 3, 2, 1)
FLOATS = st.one_of(
    st.floats(width=32),  # including NaN, infinities, denormals and -0.0
    st.floats(-100, 100, width=32),
    st.sampled_from([0.0, -0.0, 1.0, LIMIT, -LIMIT, 65520.0, 2.0**-24, -(2.0**-25), 1e-40]),
)


@st.composite
def cases(draw: st.DrawFn):
    dim, block = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    bits = draw(st.sampled_from(BITS))
    channel = ChannelCodec(dim, bits, block)
    rows = RowsCodec(IntegerCodec(dim, bits, draw(st.integers(0, 4))), block)
    codec = draw(st.sampled_from([channel, rows]))
    count = draw(st.integers(1, 3)) * block * dim
    numbers = draw(st.lists(FLOATS, min_size=count, max_size=count))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return codec, torch.tensor(numbers, dtype=torch.float32).to(dtype).view(-1, block, dim)


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_bytes_and_vectors_are_those_of_the_oracle(case):
    codec, x = case
    data, back = coded(codec, x)
    for row, vectors, block in zip(data.tolist(), x.double().tolist(), back.tolist(), strict=True):
        assert bytes(row).hex() == reference.encode(codec.planes, vectors).hex()
        assert block == reference.decode(codec.planes, bytes(row), codec.block)


@pytest.mark.parametrize("bits", BITS)
def test_many_normal_blocks_agree_with_the_oracle(bits):
    codec = ChannelCodec(17, bits, 5)
    x = torch.randn(40, 5, 17).bfloat16() * torch.logspace(-3, 2, 40).bfloat16()[:, None, None]
    rows = zip(codec.encode(x).tolist(), x.double().tolist(), strict=True)
    assert all(bytes(row) == reference.encode(codec.planes, block) for row, block in rows)


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_error_is_within_the_bound(case):
    expect_within_bound(*case)


def test_golden_bytes():
    # By hand: channel 0 spans -1 to 2, whose 2-bit codes have scale 1 (3c00) and zero -1 (bc00):
    # 0 3 1 2; channel 1 is flat; channel 2 is in the second plane and has scale 0.5.
    x = torch.tensor([[[-1.0, 7.0, 0.5], [2.0, 7.0, 0.0], [0.0, 7.0, 1.5], [1.0, 7.0, 1.0]]])
    codec = ChannelCodec(3, 2, 4)
    # One byte per token, dimension d at bit 2 * d; then three scales and three zeros.
    expected = "10033122 003c 0000 0038 00bc 0047 0000".replace(" ", "")
    assert codec.layout.stride == 1
    assert bytes(codec.encode(x)[0].tolist()).hex() == expected
    assert torch.equal(codec.decode(codec.encode(x)), x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("dim", "block"), [(64, 32), (13, 3), (1, 7), (6, 1)])
def test_the_contract_holds(bits, dim, block):
    check_codec(ChannelCodec(dim, bits, block))
    check_codec(RowsCodec(IntegerCodec(dim, bits, 5), block))


def test_rows_have_the_bytes_of_their_codec():
    each = IntegerCodec(5, 4, group=2)
    x = torch.randn(3, 4, 5)
    codes, meta = RowsCodec(each, 4).encode(x).split(RowsCodec(each, 4).parts, dim=1)
    for i in range(4):
        one = each.encode(x[:, i : i + 1])
        assert torch.equal(codes.view(3, 4, -1)[:, i], one[:, : each.parts[0]])
        assert torch.equal(meta.view(3, 4, -1)[:, i], one[:, each.parts[0] :])


def test_a_channel_does_not_change_another():
    codec = ChannelCodec(4, 4, 3)
    x = torch.randn(2, 3, 4)
    dirty = x.clone()
    dirty[:, :, 1] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    others = [0, 2, 3]
    back = codec.decode(codec.encode(dirty))
    assert torch.equal(back[..., others], codec.decode(codec.encode(x))[..., others])
    assert torch.allclose(back[0, :, 1], torch.tensor([0.0, LIMIT, -LIMIT]), atol=5000)


def test_keys_with_large_channels_are_closer_per_channel():
    x = torch.randn(50, 32, 64) + 40 * (torch.arange(64) % 16 == 3)
    errors = []
    for codec in (ChannelCodec(64, 4, 32), RowsCodec(IntegerCodec(64, 4), 32)):
        errors.append((codec.decode(codec.encode(x)) - x).square().mean().item())
    assert errors[0] < errors[1] / 50


@pytest.mark.parametrize("codec", [ChannelCodec(5, 4, 3), RowsCodec(IntegerCodec(5, 4), 3)])
def test_what_does_not_fit_is_refused(codec):
    with pytest.raises(ValueError, match=r"\(2, 2, 5\); expected n, 3, 5"):
        codec.encode(torch.zeros(2, 2, 5))
    with pytest.raises(ValueError, match=r"a row has 7 bytes; this codec stores \d+ per block"):
        codec.decode(torch.zeros(2, 7, dtype=torch.uint8))


def test_impossible_sizes_are_refused():
    for make in (lambda: ChannelCodec(5, 4, 0), lambda: RowsCodec(IntegerCodec(5, 4), 0)):
        with pytest.raises(ValueError, match="block is 0; use at least 1 token per block"):
            make()
    with pytest.raises(ValueError, match="bits is 5"):
        ChannelCodec(5, 5, 4)
    with pytest.raises(ValueError, match="dim is 0"):
        ChannelCodec(0, 4, 4)


def test_both_make_a_format_of_a_tier():
    form = TokenFormat(ChannelCodec(64, 4, 32), RowsCodec(IntegerCodec(64, 4), 32))
    assert all(isinstance(codec, Codec) for codec in (form.key, form.value))
    assert form.parts == (32 * 32, 4 * 64, 32 * 32, 4 * 32)
    assert form.nbytes == 32 * 76
