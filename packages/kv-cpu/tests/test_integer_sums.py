"""Sums of integer products at their bounds, numbers that no integer stands for, and what is not
multiplied as integers."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from attention_cases import random_case
from attention_judge import assert_same_output
from kv_cpu.library import FORCE
from native_sets import SETS

WIDTHS = [("8", 256), ("8", 264), ("8", 512), *((bits, 1024) for bits in "4321")]


def full(bits, dim, keys, values):
    """Return a case of 256 tokens with all bits of codes set, and a scale and zero point each."""
    shape = {"D": dim, "Dv": dim, "G": 3, "L": 1, "stored": 256, "page": 256, "group": dim}
    shape |= {"B": 1, "H": 1, "ragged": False, "fresh": False, "scale": dim**-0.5}
    c = random_case(7, tiers=[(bits, bits)], **shape)
    (pages,) = c.pages
    segments = pages.layout.segments
    for offset, rows, size in (segments[0], segments[2]):
        pages.data[:, offset : offset + rows * size] = 255
    for (offset, rows, size), pair in ((segments[1], keys), (segments[3], values)):
        numbers = torch.tensor(pair, dtype=torch.float16).view(torch.uint8)
        pages.data[:, offset : offset + rows * size] = numbers.repeat(rows)
    return c, segments


@pytest.mark.parametrize(("bits", "dim"), WIDTHS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.grid(3)
def test_the_largest_sums_of_values(near, bits, dim, sign):
    c, _ = full(bits, dim, (1.0, 0.0), (2.0**-7, -1.0))
    c.q.fill_(sign)
    assert_same_output(c, "cpu", near)


@pytest.mark.parametrize(("bits", "dim"), WIDTHS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.grid(3)
def test_the_largest_sums_of_keys(near, bits, dim, sign):
    """Half of the tokens have the largest logit, the others one that is lower or higher by 2."""
    most = 2 ** int(bits) - 1
    c, segments = full(bits, dim, (2.0**-8, 0.0), (1.0, 0.0))
    (pages,) = c.pages
    for offset, rows, size in (segments[0], segments[2]):
        pages.data[:, offset : offset + rows * size // 2] = 0
    c.q.fill_(sign * 2 / (2.0**-8 * most * dim * c.scale))
    assert_same_output(c, "cpu", near)
    share = torch.sigmoid(torch.tensor(2.0 * sign))
    assert (c.attend(backend="cpu").out / most - share).abs().max() < 1e-3


@pytest.mark.parametrize("bits", ["8", "4", "3", "2", "1"])
@pytest.mark.parametrize("wild", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.grid(3)
def test_a_query_that_is_not_finite_is_apart_from_the_others(near, bits, wild):
    c, _ = full(bits, 64, (2.0**-8, 0.0), (1.0, 0.0))
    c.q.normal_(generator=torch.Generator().manual_seed(0))
    others = replace(c, q=c.q.clone())
    c.q[0, 0, 1, 0, 5] = wild
    found, expected = (x.attend(backend="cpu").out for x in (c, others))
    assert found[0, 0, 1].isnan().all()
    torch.testing.assert_close(found[0, 0, ::2], expected[0, 0, ::2], rtol=near, atol=near)


@pytest.mark.parametrize("bits", ["8", "4", "3", "2", "1"])
@pytest.mark.parametrize("wild", [torch.nan, torch.inf])
@pytest.mark.parametrize("row", [0, 100, 255])
@pytest.mark.grid(3)
def test_a_scale_that_is_not_finite_is_seen_in_the_output(near, bits, wild, row):
    c, segments = full(bits, 64, (2.0**-8, 0.0), (1.0, 0.0))
    (pages,) = c.pages
    offset, _, size = segments[3]
    scale = torch.tensor([wild], dtype=torch.float16).view(torch.uint8)
    pages.data[:, offset + row * size : offset + row * size + 2] = scale
    assert not c.attend(backend="cpu").out.isfinite().any()


@pytest.mark.parametrize("group", [4, 5, 9, 17])
@pytest.mark.parametrize("dims", [(64, 128), (80, 24), (128, 33), (7, 200)], ids=str)
@pytest.mark.parametrize("tier", [("8", "4"), ("4", "2"), ("3", "3"), ("2", "1")], ids=str)
@pytest.mark.grid(3)
def test_groups_of_queries_and_widths_that_fill_registers_or_not(near, group, dims, tier):
    D, Dv = dims
    shape = {"D": D, "Dv": Dv, "G": group, "L": 1, "stored": 300, "page": 16, "group": 256}
    assert_same_output(random_case(5, B=1, tiers=[tier], scale=D**-0.5, **shape), "cpu", near)


@pytest.mark.parametrize("name", [x for x in SETS if not x.startswith("amx")])
@pytest.mark.parametrize(
    ("tier", "dim", "group"),
    [
        *((name, 64, 64) for name in ("float32", "float16", "bfloat16", "4n", "2n")),
        *((bits, 64, 16) for bits in "842"),
        ("8", 512, 512),
    ],
)
def test_other_formats_are_multiplied_in_float32(name, tier, dim, group):
    """Numbers, levels, groups of scales, and 8 bits of more dimensions than integer sums hold."""
    shape = {"D": dim, "Dv": dim, "G": 3, "L": 1, "B": 1, "stored": 300, "page": 16}
    c = random_case(5, tiers=[(tier, tier)], group=group, scale=dim**-0.5, **shape)
    with patch.dict(os.environ, {FORCE: name}):
        assert_same_output(c, "cpu", 2e-5)
