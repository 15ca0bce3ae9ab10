import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_policy import PageLayout, RawCodec, TileCounts, TokenFormat
from kv_policy.bit_layout import BitLayout, PlaneLayout
from kv_policy.codec import Codec
from kv_policy.key_codes import code_bytes


class Fake:
    """A codec with sizes only."""

    layout = None

    def __init__(self, block: int, parts: tuple[int, ...]) -> None:
        self.dim, self.block, self.parts = 1, block, parts

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    decode = bound = encode


PARTS = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
FORMATS = st.builds(
    lambda block, key, value: TokenFormat(Fake(block, key), Fake(block, value)),
    st.sampled_from([1, 4, 16]),
    PARTS,
    PARTS,
)


def check_arithmetic(layout: PageLayout) -> None:
    format, ends = layout.format, []
    assert layout.rows * format.block == layout.tokens
    for (offset, rows, size), part in zip(layout.segments, format.parts, strict=True):
        assert (rows, size) == (layout.rows, part)
        ends.append((offset, offset + rows * size))
    ends.append((layout.score_offset, layout.score_offset + 4 * layout.tokens * layout.scores))
    ends.append(
        (layout.position_offset, layout.position_offset + 4 * layout.tokens * layout.positions)
    )
    assert ends[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(ends))
    assert ends[-1][1] == layout.used <= layout.nbytes
    assert layout.used == layout.tokens * layout.token_bytes


@given(FORMATS, st.integers(1, 8), st.booleans(), st.booleans())
def test_sized_wastes_nothing(
    format: TokenFormat, blocks: int, scores: bool, positions: bool
) -> None:
    layout = PageLayout.sized(format, blocks * format.block, scores, positions)
    check_arithmetic(layout)
    assert layout.used == layout.nbytes


@given(FORMATS, st.integers(0, 4000), st.booleans(), st.booleans())
def test_fitted_holds_as_many_blocks_as_there_is_room_for(
    format: TokenFormat, spare: int, scores: bool, positions: bool
) -> None:
    block = PageLayout.sized(format, format.block, scores, positions).nbytes
    layout = PageLayout.fitted(format, block + spare, scores, positions)
    check_arithmetic(layout)
    assert layout.nbytes == block + spare
    assert layout.nbytes - layout.used < block


@given(FORMATS, st.integers(1, 8), st.booleans(), st.booleans(), st.booleans())
def test_bounds_are_behind_everything_else(
    format: TokenFormat, blocks: int, scores: bool, positions: bool, coded: bool
) -> None:
    given = format, blocks * format.block, scores, positions
    plain = PageLayout.sized(*given)
    layout = PageLayout.sized(*given, bounds=True, coded=coded)
    assert layout.segments == plain.segments
    assert (layout.score_offset, layout.position_offset) == (
        plain.score_offset,
        plain.position_offset,
    )
    assert layout.token_bytes == plain.token_bytes
    nbytes = code_bytes(format.key.dim, given[1]) if coded else 2 * 2 * format.key.dim
    assert (plain.bound_bytes, layout.bound_bytes) == (0, nbytes)
    assert layout.bound_offset % 16 == layout.nbytes % 16 == 0
    assert plain.used <= layout.bound_offset < plain.used + 16
    assert layout.used == layout.bound_offset + layout.bound_bytes <= layout.nbytes
    assert layout.nbytes < layout.used + 16
    assert layout != PageLayout(*given[:2], layout.nbytes, scores, positions)
    with pytest.raises(ValueError, match="it must have a multiple of 16 bytes"):
        PageLayout(*given[:2], layout.nbytes + 8, scores, positions, True, coded)
    with pytest.raises(ValueError, match=f"take {layout.used} bytes"):
        PageLayout(*given[:2], layout.nbytes - 16, scores, positions, True, coded)
    with pytest.raises(ValueError, match="give bounds=True, too"):
        PageLayout(*given[:2], layout.nbytes, scores, positions, coded=True)


@given(FORMATS, st.integers(1, 20))
def test_what_does_not_fit_is_refused(format: TokenFormat, missing: int) -> None:
    room = PageLayout.sized(format, format.block).nbytes
    with pytest.raises(ValueError, match="it must hold at least one block"):
        PageLayout.fitted(format, max(0, room - missing))
    with pytest.raises(ValueError, match=f"the page has {room - 1}"):
        PageLayout(format, format.block, room - 1)
    if format.block > 1:
        with pytest.raises(ValueError, match="only whole blocks"):
            PageLayout.sized(format, format.block + 1)


def test_a_page_of_tiers_with_different_formats_is_equally_large() -> None:
    high, low = (
        TokenFormat(RawCodec(64, dtype), RawCodec(64, dtype))
        for dtype in (torch.float32, torch.half)
    )
    page = PageLayout.sized(high, 8, scores=True, positions=True).nbytes
    assert PageLayout.fitted(low, page, scores=True, positions=True).tokens == 15


def test_a_format_needs_equal_blocks() -> None:
    with pytest.raises(ValueError, match="encodes 1 tokens together and the value codec 4"):
        TokenFormat(Fake(1, (4,)), Fake(4, (4,)))
    assert isinstance(Fake(1, (1,)), Codec)


@given(st.integers(1, 300), st.sampled_from([1, 2, 4, 8]), st.integers(1, 300))
def test_bit_layout_places_every_code_once(dim: int, bits: int, group: int) -> None:
    layout = BitLayout(dim, bits, group)
    taken = {
        (byte, bit + i) for d in range(dim) for byte, bit in [layout.place(d)] for i in range(bits)
    }
    assert len(taken) == dim * bits
    assert all(0 <= byte < layout.stride and 0 <= bit < 8 for byte, bit in taken)
    assert layout.stride * 8 - dim * bits < 8
    assert layout.zero_offset == layout.scale_offset + 2 * layout.groups
    assert layout.parts == (layout.stride, layout.zero_offset + 2 * layout.groups)


@pytest.mark.parametrize(("dim", "bits", "group"), [(64, 3, 64), (0, 4, 1), (64, 4, 0)])
def test_bit_layout_refuses(dim: int, bits: int, group: int) -> None:
    with pytest.raises(ValueError, match="is"):
        BitLayout(dim, bits, group)


@given(st.integers(1, 300), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 300))
def test_planes_place_every_bit_once(dim: int, bits: int, group: int) -> None:
    layout = PlaneLayout(dim, bits, group)
    places = [layout.place(d, bit) for d in range(dim) for bit in range(bits)]
    assert len(set(places)) == dim * bits
    assert all(0 <= byte < layout.stride and 0 <= bit < 8 for byte, bit in places)
    assert layout.stride * 8 - dim * bits < 8 * len(layout.each)
    whole = BitLayout(dim, bits, group) if bits != 3 else layout
    assert layout.plain == whole
    assert (layout.parts, layout.groups) == (whole.parts, whole.groups)


def test_levels_have_a_scale_and_no_zero() -> None:
    levels = (-1.0, -0.5, 0.5, 2.0)
    layout = PlaneLayout(10, 2, 4, tokens=3, levels=levels)
    assert layout.plain is layout
    assert layout.parts == (9, 6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bits": 5}, "bits is 5; a code has 1, 2, 3, 4 or 8 bits"),
        ({"bits": 2, "levels": (1.0, 2.0)}, "levels are 2; codes of 2 bits have 4"),
        ({"bits": 1, "levels": (1.0, 1.0)}, "levels are .1.0, 1.0.; use ascending ones"),
        ({"bits": 1, "levels": (1.0, math.inf)}, "use ascending ones of at most 2..127 in size"),
        ({"bits": 1, "levels": (math.nan, 1.0)}, "levels are .nan, 1.0.; use ascending ones"),
        ({"bits": 4, "dim": 0}, "dim is 0"),
        ({"bits": 3, "tokens": 0}, "tokens 0; all must be at least 1"),
    ],
)
def test_impossible_planes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlaneLayout(**{"dim": 8, "group": 8, **sizes})


def test_a_bit_beyond_a_code_has_no_place() -> None:
    with pytest.raises(ValueError, match="bit 3 is given, beyond the 3 of a code"):
        PlaneLayout(8, 3, 8).place(0, 3)


def test_lengths_of_counted_tiles_lie_one_after_another() -> None:
    """Kernels read them so: one number for all heads of the only sequence must be as many."""
    one = torch.tensor([33], dtype=torch.int32)
    expanded = one[:, None].expand(-1, 4).reshape(1, -1)
    assert expanded.stride(1) == 0  # for several sequences, torch copies here
    found = TileCounts(expanded).length
    assert found.is_contiguous()
    assert found.tolist() == [[33] * 4]
    held = torch.tensor([[5, 6]], dtype=torch.int32)
    assert TileCounts(held).length is held  # else a captured step would not see it change
