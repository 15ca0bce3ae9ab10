"""Page sizes: their contents, and that no other size has fewer unused bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_paging import fit
from kv_policy import RawCodec, TokenFormat


def form(nbytes: int) -> TokenFormat:
    """Return a format with this many bytes per token, all but one element in its key."""
    return TokenFormat(RawCodec(nbytes // 2 - 1, torch.float16), RawCodec(1, torch.float16))


def test_the_formats_of_leankv_leave_nothing():
    high, low = fit([form(104), form(56)], 16, True, True)  # K8V4 and K4V2 at 64 dimensions
    assert (high.nbytes, high.tokens, low.tokens) == (1792, 16, 28)
    assert high.used == low.used == 1792


def test_one_format_is_as_asked():
    for tokens in (1, 5, 16):
        (layout,) = fit([form(104)], tokens)
        assert (layout.tokens, layout.nbytes, layout.used) == (tokens, tokens * 104, tokens * 104)


@given(
    st.lists(st.integers(3, 60), min_size=1, max_size=4),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_no_page_near_it_has_fewer_bytes_unused(halves, tokens, scores, positions):
    formats = [form(2 * half) for half in halves]
    sizes = [f.nbytes + 4 * (scores + positions) for f in formats]
    if 2 * tokens * sizes[0] < max(sizes):
        with pytest.raises(ValueError, match="use larger pages"):
            fit(formats, tokens, scores, positions)
        return
    layouts = fit(formats, tokens, scores, positions)
    (nbytes,) = {layout.nbytes for layout in layouts}
    assert [layout.tokens for layout in layouts] == [nbytes // size for size in sizes]
    assert all(layout.tokens for layout in layouts)

    def unused(n: int) -> float:
        return sum(n % size for size in sizes) / n

    assert sum(nbytes - layout.used for layout in layouts) == sum(nbytes % s for s in sizes)
    for count in range(max(1, tokens // 2), 2 * tokens + 1):
        if count * sizes[0] >= max(sizes):
            assert unused(nbytes) <= unused(count * sizes[0])


def test_what_cannot_be_laid_out():
    with pytest.raises(ValueError, match="no format is given"):
        fit([])
    with pytest.raises(ValueError, match="a page cannot hold 0 tokens"):
        fit([form(8)], 0)
    with pytest.raises(ValueError, match=r"1 tokens of tier 1, .* take 100; use larger pages"):
        fit([form(8), form(100)], 2)
