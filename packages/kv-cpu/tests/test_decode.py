"""Native decode steps, compared with the reference, for each available instruction set."""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import random_case
from attention_judge import (
    FORMAT,
    SHAPES,
    TOLERANCE,
    assert_same_observation,
    assert_same_output,
)
from kv_attention import attend
from kv_cpu.backend import declined
from kv_cpu.library import chosen
from kv_paging import PagePool, Tiers, fit
from kv_policy import Observe, RawCodec, TokenFormat
from kv_quant import ChannelCodec, CodebookCodec, IntegerCodec, RowsCodec

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODES = ["8", "4", "3", "2", "1", "4n", "3n", "2n", "1n"]
NATIVE = st.sampled_from([*CODES, "float16", "bfloat16", "float32"])
STEPS = SHAPES.flatmap(
    lambda shape: st.sampled_from(DTYPES).map(lambda dtype: shape | {"L": 1, "dtype": dtype})
)


def assert_native(case, near):
    reason = declined(case.inputs())
    assert reason is None
    assert_same_output(case, "cpu", near)


@settings(max_examples=50)
@given(st.integers(0, 99), STEPS, st.lists(st.tuples(NATIVE, NATIVE), max_size=3))
def test_any_decode_step(case, near, seed, shape, tiers):
    assert_native(case(seed, tiers=tiers, **shape), near)


@settings(max_examples=30)
@given(st.integers(0, 99), SHAPES, st.lists(st.tuples(FORMAT, FORMAT), max_size=2))
def test_any_cache(case, near, seed, shape, tiers):
    assert_same_output(case(seed, tiers=tiers, **shape), "cpu", near)


@pytest.mark.parametrize("value", CODES)
@pytest.mark.parametrize("key", CODES)
@pytest.mark.parametrize("group", [6, 9, 21])
@pytest.mark.grid(3)
def test_codes_of_every_size_and_odd_groups(case, near, key, value, group):
    assert_native(case(5, D=21, Dv=21, L=1, group=group, tiers=[(key, value)]), near)


BLOCKS = [("8c", "4r"), ("4c", "4r"), ("2c", "8r"), ("1c", "1c"), ("4r", "2c"), ("3c", "3r")]


@pytest.mark.parametrize("tier", BLOCKS)
@pytest.mark.parametrize("dims", [(1, 1), (21, 5), (64, 64), (33, 128)], ids=str)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.grid(3)
def test_scales_of_blocks_of_tokens(case, near, tier, dims, holes):
    D, Dv = dims
    for block, page, stored in ((3, 2, 40), (32, 1, 90), (16, 4, 300)):
        shape = {"D": D, "Dv": Dv, "group": 16, "L": 1, "stored": stored, "page": page}
        c = case(7, tiers=[tier], block=block, holes=holes, window=5, spare=1, **shape)
        assert_native(c, near)
        watch = Observe(None, "sum", also=frozenset({"entropy"}))
        assert_same_observation(c, watch, max(near, 1e-4), "cpu")


@pytest.mark.parametrize("threads", [1, 3])
def test_long_table_rows_of_blocks_beside_residual_tokens(case, near, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        c = case(3, B=1, D=64, Dv=64, L=1, tiers=[("4c", "4r")], stored=1200, block=32, page=2)
        other = case(3, B=1, D=64, Dv=64, L=1, tiers=[("float16", "float16")], stored=31, page=8)
        both = (*c.pages, *other.pages), [*c.page_positions, *other.page_positions]
        assert_native(replace(c, pages=both[0], page_positions=both[1]), near)
    finally:
        torch.set_num_threads(before)


def test_blocks_with_scales_per_channel_and_their_residual(near):
    key, value = ChannelCodec(20, 4, 16), RowsCodec(IntegerCodec(20, 2, 8), 16)
    (layout,) = fit([TokenFormat(key, value)], 32, positions=True)
    raw = TokenFormat(RawCodec(20, torch.float16), RawCodec(20, torch.float16))
    tiers = Tiers(PagePool(layout.nbytes), [layout], 1, 2, 3, raw=raw)
    place = torch.arange(150).expand(6, -1)
    keep = torch.ones(6, 150, dtype=torch.bool)
    keep[1, 40:] = False
    torch.manual_seed(0)
    tiers.append(0, tiers.table_rows(), *torch.randn(2, 6, 150, 20), keep, None, place)
    assert len(tiers.views(0)) == 2
    q, now = torch.randn(2, 3, 4, 1, 20), torch.full((2, 1), 150)
    with patch("kv_cpu.backend.attend_in_torch", side_effect=AssertionError("it went to torch")):
        found = attend(q, now, tiers.views(0), [], 0.3, backend="cpu").out
    wanted = attend(q, now, tiers.views(0), [], 0.3, backend="torch").out
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("dim", [64, 128, 256, 127, 61, 45, 40, 1])
@pytest.mark.parametrize("bits", [4, 3, 2, 1])
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.grid(3)
def test_codebooks_and_codes_of_3_bits_in_pages(near, dim, bits, length):
    key, value = CodebookCodec(dim, bits), IntegerCodec(dim, 3)
    for form in (TokenFormat(key, value), TokenFormat(value, key)):
        (layout,) = fit([form], 32)
        tiers = Tiers(PagePool(layout.nbytes), [layout], 1, 2, 3)
        keep = torch.ones(6, 300, dtype=torch.bool)
        keep[1, 40:] = False
        g = torch.Generator().manual_seed(dim)
        x = torch.randn(2, 6, 300, dim, generator=g)
        tiers.append(0, tiers.table_rows(), *x, keep, None, None)
        q, now = torch.randn(2, 3, 4, length, dim, generator=g), 300 + torch.arange(length)
        given = (q, now.expand(2, -1), tiers.views(0), [], dim**-0.5)
        if chosen() == "plain" and length > 1:
            continue  # which leaves prompts to torch
        with torch_unused():
            found = attend(*given, backend="cpu").out
        torch.testing.assert_close(found, exact(*given), rtol=near, atol=near)


@contextmanager
def torch_unused():
    with (
        patch("kv_cpu.backend.attend_in_torch", side_effect=AssertionError("it went to torch")),
        patch("kv_cpu.attention_mass.forward", side_effect=AssertionError("it went to torch")),
    ):
        yield


def exact(q, now, pages, dense, scale):
    """Return attention in float64 over the same stored tokens."""
    return attend(q.double(), now, pages, dense, scale, backend="torch").out.float()


@pytest.mark.parametrize(("key", "value"), [(1, 256), (31, 33), (64, 64), (100, 96), (256, 1)])
@pytest.mark.parametrize("bits", [*CODES, "float16", "bfloat16", "float32"])
@pytest.mark.grid(3)
def test_dimensions(case, near, key, value, bits):
    shape = {"D": key, "Dv": value, "L": 1, "stored": 40, "page": 16, "window": 4}
    assert_native(case(1, tiers=[(bits, bits)], **shape), near)


@pytest.mark.parametrize("dims", [(512, 512), (576, 512), (192, 128)], ids=str)
@pytest.mark.parametrize("bits", ["8", "4", "3", "4n", "bfloat16", "float32"])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, True)])
@pytest.mark.grid(3)
def test_large_heads_and_values_of_other_dimensions(case, near, dims, bits, softcap, sinks):
    D, Dv = dims
    shape = {"D": D, "Dv": Dv, "group": D, "L": 1, "stored": 40, "page": 16, "window": 4}
    c = case(12, tiers=[(bits, bits)], scale=2 * D**-0.5, **shape)
    assert_native(replace(c, softcap=softcap, sinks=torch.randn(2, 2) if sinks else None), near)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("level", [-30.0, 3.0, 40.0])
@pytest.mark.grid(3)
def test_sinks_count_once_for_each_query_of_a_table_row_in_pieces(case, near, threads, level):
    tiers = [("8", "4"), ("4", "2"), ("float16", "float16")]
    c = case(3, B=2, D=64, Dv=64, L=1, tiers=tiers, stored=1200, page=16, scale=0.1, sinks=True)
    c = replace(c, sinks=c.sinks + level)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_native(c, near)
        watch = Observe(None, "sum", also=frozenset({"entropy"}))
        assert_same_observation(c, watch, max(near, 1e-4), "cpu")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 70])
def test_query_groups(case, near, group):
    assert_native(
        case(2, G=group, D=16, Dv=16, L=1, stored=40, tiers=[("8", "4"), ("4", "2")]), near
    )


@pytest.mark.parametrize("stored", [1, 3, 15, 16, 17, 48, 63, 64, 65, 130, 255, 257])
@pytest.mark.parametrize("dim", [64, 70])
@pytest.mark.grid(3)
def test_runs_that_fill_a_tile_or_not(case, near, stored, dim):
    shape = {"D": dim, "Dv": dim, "G": 9, "L": 1, "stored": stored, "page": 300, "group": dim}
    tiers = [("8", "8"), ("4", "2"), ("1", "4")]
    assert_native(case(11, B=1, H=1, ragged=False, tiers=tiers, fresh=False, **shape), near)


@pytest.mark.parametrize("page", [3, 7, 9, 15, 18, 28, 33])
@pytest.mark.parametrize(
    ("key", "value"), [("8", "4"), ("4", "2"), ("2", "1"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.grid(3)
def test_rows_of_a_tile_in_several_pages(case, near, page, key, value, dim, holes):
    shape = {"D": dim, "Dv": dim, "G": 4, "L": 1, "group": dim, "stored": 150, "page": page}
    assert_native(case(7, B=1, tiers=[(key, value)], holes=holes, **shape), near)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.grid(3)
def test_long_table_rows_in_pieces(case, near, threads, holes):
    tiers = [("8", "4"), ("4", "2"), ("float16", "float16")]
    c = case(3, B=1, D=64, Dv=64, L=1, tiers=tiers, stored=1200, page=16, window=40, holes=holes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_native(c, near)
    finally:
        torch.set_num_threads(before)


def test_logits_that_are_far_apart(case, near):
    c = case(4, D=32, Dv=32, L=1, stored=700, page=16, tiers=[("8", "4"), ("float32", "float32")])
    c.q.mul_(10)
    assert_native(c, 10 * near)


def test_table_rows_without_tokens(case, near):
    c = case(8, B=2, H=3, L=1, tiers=[("8", "4"), ("float32", "float32")], fresh=False)
    for pages in c.pages:
        pages.length[0, 1] = pages.length[1, 2] = 0
    assert_native(c, near)
    assert (c.attend(backend="cpu").out[0, 1] == 0).all()


def test_nothing_at_all(case, near):
    assert_native(case(9, L=1, tiers=[], fresh=False), near)


def test_views_with_any_strides(near):
    c = random_case(9, B=2, L=1, G=2, D=8, Dv=8, tiers=[("8", "4")], window=6)
    expected = c.attend(backend="cpu").out
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (c.q, c.dense[0].key)]
    spread = torch.stack([turned[0]] * 2, dim=-1)[..., 0]
    wide = torch.full((2, 6 + 3), 7)
    wide[:, 1:7] = c.dense[0].position
    tokens = type(c.dense[0])(turned[1], c.dense[0].value, wide[:, 1:7])
    found = type(c)(spread, c.position, c.pages, [tokens, *c.dense[1:]], c.page_positions)
    assert torch.equal(found.attend(backend="cpu").out, expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_pages_inside_a_wider_tensor(case, near, dtype):
    c = case(10, L=1, tiers=[("8", "4")], dtype=dtype)
    (pages,) = c.pages
    wide = torch.full((len(pages.data), pages.layout.nbytes + 9), 255, dtype=torch.uint8)
    wide[:, 5:-4] = pages.data
    inside = type(pages)(wide[:, 5:-4], pages.table.long(), pages.length.int(), pages.layout)
    moved = type(c)(c.q, c.position, [inside], c.dense, c.page_positions)
    assert torch.equal(moved.attend(backend="cpu").out, c.attend(backend="cpu").out)


@pytest.mark.parametrize("bits", ["8", "4", "2", "1"])
@pytest.mark.parametrize("dim", [96, 128, 200, 256, 300])
@pytest.mark.grid(3)
def test_one_scale_for_a_long_vector(case, near, dim, bits):
    shape = {"D": dim, "Dv": dim, "G": 5, "L": 1, "stored": 90, "page": 32, "group": dim}
    assert_native(case(6, tiers=[(bits, bits)], scale=dim**-0.5, **shape), near)


@pytest.mark.parametrize("bits", ["8", "4"])
def test_a_weight_that_is_all_there_is(case, near, bits):
    """The maximum integer sums."""
    shape = {"D": 256, "Dv": 256, "G": 4, "L": 1, "stored": 256, "page": 256, "group": 256}
    c = case(7, B=1, H=1, ragged=False, tiers=[(bits, bits)], fresh=False, **shape)
    (pages,) = c.pages
    of = pages.layout.segments
    for offset, rows, size in (of[0], of[2]):
        pages.data[:, offset : offset + rows * size] = 255
    for fill in (3.0, -3.0):
        c.q.fill_(fill)
        assert_native(c, near)
