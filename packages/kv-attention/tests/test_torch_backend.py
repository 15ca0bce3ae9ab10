"""The torch backend, compared with the reference on many shapes of caches."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_judge import FORMAT, SHAPES, TOLERANCE, assert_same_output
from kv_policy import PagedTokens


@settings(max_examples=60)
@given(st.integers(0, 99), SHAPES, st.lists(st.tuples(FORMAT, FORMAT), max_size=3))
@pytest.mark.parametrize("room", [1 << 19, 50])
def test_any_cache(case, room, seed, shape, tiers):
    with patch("kv_attention.parts.ROOM", room):
        assert_same_output(case(seed, tiers=tiers, **shape))


@pytest.mark.parametrize("value", ["8", "4", "2", "1"])
@pytest.mark.parametrize("key", ["8", "4", "2", "1"])
@pytest.mark.parametrize("group", [6, 9, 21])
@pytest.mark.parametrize("L", [1, 30])
def test_codes_of_every_size_and_odd_groups(case, key, value, group, L):
    c = case(5, D=21, Dv=21, L=L, group=group, tiers=[(key, value)], dtype=torch.float64)
    assert_same_output(c)


@pytest.mark.parametrize("L", [1, 20])
def test_blocks_of_tokens_that_only_their_codec_can_read(case, L):
    for holes in (False, True):
        shape = {"D": 6, "Dv": 7, "L": L, "block": 4, "page": 2, "window": 3, "holes": holes}
        assert_same_output(case(6, tiers=[("shared", "shared")], **shape))


@pytest.mark.parametrize("padding", ["none", "left", "right", "all"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_long_fresh_chunks(case, padding, dtype):
    c = case(7, B=3, L=300, G=3, D=16, Dv=16, padding=padding, tiers=[], dtype=dtype)
    assert_same_output(c)


@pytest.mark.parametrize("L", [1, 40])
def test_table_rows_without_tokens(case, L):
    c = case(8, B=2, H=3, L=L, tiers=[("8", "4"), ("float32", "float32")], fresh=False)
    for pages in c.pages:
        pages.length[0, 1] = pages.length[1, 2] = 0
    assert_same_output(c)
    found = c.attend()
    assert (found.out[0, 1] == 0).all()
    assert (found.out[1, 2] == 0).all()


def test_views_with_any_strides(case):
    c = case(9, B=2, L=12, G=2, D=8, Dv=8, dtype=torch.float64, tiers=[])
    expected = c.attend().out
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (c.q, c.dense[0].key)]
    inside_out = c.dense[0].value.mT.contiguous().mT
    tokens = type(c.dense[0])(turned[1], inside_out, c.dense[0].position)
    found = type(c)(turned[0], c.position, [], [tokens], []).attend().out
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_pages_inside_a_wider_tensor(case):
    c = case(10, tiers=[("8", "4")], dtype=torch.float64)
    (pages,) = c.pages
    wide = torch.full((len(pages.data), pages.layout.nbytes + 9), 255, dtype=torch.uint8)
    wide[:, 5:-4] = pages.data
    inside = PagedTokens(wide[:, 5:-4], pages.table.long(), pages.length, pages.layout)
    moved = type(c)(c.q, c.position, [inside], c.dense, c.page_positions)
    assert torch.equal(moved.attend().out, c.attend().out)


def test_own_tokens_out_of_order_are_not_taken_for_a_causal_chunk(case):
    c = case(11, B=1, L=6, tiers=[], dtype=torch.float64)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    tokens = c.dense[0]
    mixed = type(tokens)(tokens.key, tokens.value, tokens.position[:, order])
    assert_same_output(type(c)(c.q, c.position[:, order], [], [mixed], []))


def test_as_many_earlier_tokens_as_queries_are_not_taken_for_a_causal_chunk(case):
    c = case(12, B=2, L=6, window=6, tiers=[], dtype=torch.float64)
    past = type(c.dense[0])(*(getattr(c.dense[1], x) for x in ("key", "value")), c.position - 6)
    assert_same_output(type(c)(c.q, c.position, [], [past, c.dense[1]], []))


def test_a_chunk_split_in_two_parts_changes_nothing(case):
    c = case(12, L=10, D=8, Dv=8, tiers=[], dtype=torch.float64)
    tokens = c.dense[0]
    halves = [
        type(tokens)(tokens.key[:, :, at], tokens.value[:, :, at], tokens.position[:, at])
        for at in (slice(0, 4), slice(4, 10))
    ]
    found = type(c)(c.q, c.position, [], halves, []).attend().out
    torch.testing.assert_close(found, c.attend().out, rtol=1e-12, atol=1e-12)
