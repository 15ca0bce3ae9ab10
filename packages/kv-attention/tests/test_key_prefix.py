"""Values that are the first dimensions of their keys, as in latent attention, in every backend."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_judge import (
    FORMAT,
    OBSERVE,
    SHAPES,
    WATCHED_SHAPES,
    assert_same_observation,
    assert_same_output,
)
from kv_attention import compiled
from kv_policy import PagedTokens, PageLayout, RawCodec, TokenFormat

DIMS = st.sampled_from([(3, 1), (8, 8), (17, 8), (24, 16)])
TIERS = st.lists(st.tuples(FORMAT, st.just("prefix")), min_size=1, max_size=3)


@settings(max_examples=50)
@given(st.integers(0, 99), SHAPES, DIMS, TIERS)
@pytest.mark.parametrize("room", [1 << 19, 50])
def test_any_cache(case, room, seed, shape, dims, tiers):
    shape = shape | {"D": dims[0], "Dv": dims[1], "G": 4 * shape["G"]}
    with patch("kv_attention.parts.ROOM", room):
        assert_same_output(case(seed, tiers=tiers, **shape))


@settings(max_examples=40)
@given(st.integers(0, 99), WATCHED_SHAPES, OBSERVE, TIERS)
def test_any_observation(case, seed, shape, observe, tiers):
    assert_same_observation(case(seed, D=17, Dv=8, tiers=tiers, **shape), observe)


@pytest.mark.parametrize("L", [1, 20])
@pytest.mark.parametrize("holes", [False, True])
def test_blocks_of_tokens_that_only_their_codec_can_read(case, L, holes):
    shape = {"D": 6, "Dv": 4, "L": L, "block": 4, "page": 2, "window": 3, "holes": holes}
    assert_same_output(case(6, tiers=[("shared", "prefix")], **shape))


@pytest.mark.parametrize("name", ["8", "4", "float32", "bfloat16"])
@pytest.mark.parametrize("L", [1, 20])
def test_the_result_is_that_of_values_stored_apart(case, name, L):
    """Pages with a copy of the decoded values give the same output as those with keys alone."""
    once = case(3, D=17, Dv=8, L=L, G=6, tiers=[(name, "prefix")])
    (part,) = once.pages
    form = part.layout.format
    apart = replace(once, pages=[copied(part)])
    assert apart.pages[0].layout.nbytes > part.layout.nbytes
    assert form.nbytes == sum(form.key.parts)
    torch.testing.assert_close(once.attend().out, apart.attend().out, rtol=1e-5, atol=1e-5)


def copied(part: PagedTokens) -> PagedTokens:
    """Return the pages with each value in float32 after the rows of its keys."""
    form, tokens = part.layout.format, part.layout.tokens
    keys = [
        part.data[:, offset : offset + rows * size].reshape(-1, size)
        for offset, rows, size in part.layout.segments
    ]
    values = form.key.decode(torch.cat(keys, 1))[:, 0, : form.value.dim].float().contiguous()
    twice = PageLayout.sized(TokenFormat(form.key, RawCodec(form.value.dim, torch.float32)), tokens)
    rows = values.view(torch.uint8).view(len(part.data), -1)
    data = torch.cat((part.data[:, : tokens * sum(form.key.parts)], rows), 1)
    return replace(part, data=data, layout=twice)


def test_compiled_kernels_decline_such_pages(case):
    c = case(3, D=17, Dv=8, tiers=[("8", "prefix")])
    reason = "values that are the first dimensions of their keys"
    assert compiled.refused(c.inputs(), 1024, 1024) == reason
    assert compiled.refused(replace(c, pages=[], page_positions=[]).inputs(), 1024, 1024) is None
