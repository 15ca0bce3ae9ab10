"""Native attention of a few queries, compared with the reference, and with a decode step."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import random_case
from attention_judge import SHAPES, assert_same_output
from kv_cpu.few import MOST, multi_query_decode

NAMES = st.sampled_from(["8", "4", "3", "2", "1", "4n", "3n", "float16", "bfloat16", "float32"])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
TIERS = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def no_torch(near):
    """Fail if torch reads pages."""
    with patch("kv_attention.parts.PagedPart.keys", side_effect=AssertionError("torch read them")):
        yield


@settings(max_examples=30)
@given(st.integers(0, 99), SHAPES, st.integers(2, MOST), DTYPES, TIERS)
def test_any_few_queries(case, near, seed, shape, length, dtype, tiers):
    c = case(seed, tiers=tiers, **shape | {"L": length, "dtype": dtype})
    assert_same_output(c, "cpu", near)


@pytest.mark.parametrize("bits", ["8", "4", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128, 300])
@pytest.mark.grid(3)
def test_long_table_rows_in_pieces(case, near, bits, dim):
    shape = {"B": 1, "D": dim, "Dv": dim, "group": dim, "stored": 700, "page": 16, "L": 5}
    c = case(3, tiers=[(bits, bits)], window=20, holes=True, scale=dim**-0.5, **shape)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same_output(c, "cpu", near)
    finally:
        torch.set_num_threads(before)


def test_a_query_among_few_attends_as_it_does_alone(case):
    c = case(4, L=6, tiers=[("8", "4"), ("float32", "float32")], padding="none")
    together = multi_query_decode(c.inputs())
    for i in range(6):
        q, position = c.q[..., i : i + 1, :], c.position[:, i : i + 1]
        alone = multi_query_decode(replace(c, q=q, position=position).inputs())
        # The number of queries per register tile changes the rounding of sums.
        torch.testing.assert_close(together.out[..., [i], :], alone.out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(together.lse[..., [i]], alone.lse, rtol=1e-5, atol=1e-6)


def test_many_queries_and_what_native_code_does_not_read_are_left_to_torch():
    for change in ({"L": MOST + 1}, {"dtype": torch.float64}, {"tiers": [("shared", "8")]}):
        c = random_case(5, **{"L": 3} | change)
        assert multi_query_decode(c.inputs()) is None


def test_a_page_outside_of_the_pool_is_an_error(case):
    c = case(6, L=3, tiers=[("8", "4"), ("4", "2")], stored=40)
    c.pages[1].table[1, 1, 0] = 10**6
    with pytest.raises(RuntimeError, match=r"pages\[1\] has page 1000000 in its table"):
        c.attend(backend="cpu")
