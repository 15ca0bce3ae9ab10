"""The native selection of pages, compared with its definition, under each instruction set."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_attention import PageBounds, logit_bounds
from kv_attention import select_pages as selected
from kv_attention.page_bounds import code_logits
from kv_attention.reading_reference import select_pages as by_definition
from kv_cpu.reading import declined, select_pages
from kv_policy import Budget, PagedTokens, PageLayout, PageReading, RawCodec, TokenFormat

READINGS = st.builds(
    PageReading,
    st.sampled_from(
        [*(Budget(share, "percent") for share in (100, 50, 33.3, 12.5, 3)), Budget(1), Budget(99)]
    ),
    st.sampled_from([0, 1, 40]),
    st.sampled_from([0, 1, 70]),
)
SHAPES = st.fixed_dictionaries(
    {
        "B": st.integers(1, 2),
        "H": st.integers(1, 2),
        "G": st.sampled_from([1, 2, 3, 4, 5, 9]),
        "D": st.sampled_from([1, 3, 16, 17, 64, 80, 128]),
        "width": st.sampled_from([1, 3, 20, 300]),
        "tokens": st.sampled_from([1, 4, 7, 16, 20, 33]),
        "missing": st.sampled_from([0, 0, 2]),
        "reverse": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        "coded": st.booleans(),
    }
)


def drawn(
    seed: int,
    *,
    B: int,
    H: int,
    G: int,
    D: int,
    width: int,
    tokens: int,
    missing: int,
    reverse: bool,
    dtype: torch.dtype,
    coded: bool = False,
) -> tuple[Tensor, PagedTokens, PageBounds]:
    """Draw queries, table rows without tokens, and bounds, or codes of keys."""
    g = torch.Generator().manual_seed(seed)
    form = TokenFormat(RawCodec(D, torch.float32), RawCodec(1, torch.float32))
    layout = PageLayout.sized(form, tokens)
    table = torch.randperm(B * H * width, generator=g).view(B, H, width).int()
    length = torch.randint(0, width * tokens + 1, (B, H), generator=g)
    pages = PagedTokens(
        torch.zeros(1, layout.nbytes, dtype=torch.uint8), table, length, layout, reverse
    )
    centre = torch.randn(B, H, width, D, generator=g)
    half = torch.rand(B, H, width, D, generator=g)
    both = torch.cat((centre + half, centre - half), -1).bfloat16()
    if coded:
        rows = -(-D // 16) * 4 * tokens
        codes = torch.randint(0, 256, (B, H, width, rows), generator=g, dtype=torch.uint8)
        scale = (0.2 + torch.rand(B, H, width, tokens, generator=g)).half()
        both = torch.cat((codes, scale.view(torch.uint8)), -1)
    count = (length // tokens - missing).clamp(min=0)
    wide = torch.randn(B, G, H, D, generator=g).to(dtype).transpose(1, 2)  # not contiguous
    return wide, pages, PageBounds(both, count)


def in_pages(pages: PagedTokens, bounds: PageBounds) -> PageBounds:
    """Return the same bounds by page, as far as they are known; pages are larger."""
    *_, width, dims = bounds.both.shape
    every = torch.zeros(pages.table.numel(), dims + 5, dtype=bounds.both.dtype)
    every[:] = 255 if bounds.coded else torch.nan
    table = pages.table.flip(2) if pages.reverse else pages.table
    known = torch.arange(width) < bounds.count[..., None]
    every[table[known].long(), :dims] = bounds.both[known]
    return replace(bounds, both=every[:, :dims])


def listed(pages: PagedTokens, b: int, h: int) -> list[int]:
    held = -(-int(pages.length[b, h]) // pages.layout.tokens)
    row = pages.table[b, h]
    return (row.flip(0) if pages.reverse else row)[:held].tolist()


def by_reference(
    q: Tensor, pages: PagedTokens, bounds: PageBounds, reading: PageReading
) -> tuple[PagedTokens, Tensor]:
    """Select by definition; return the bounds of logits too."""
    logits = code_logits(q.double(), bounds.both, pages.layout.tokens) if bounds.coded else None
    bound = logit_bounds(q.double(), bounds.both) if logits is None else logits
    return by_definition(q, pages, bounds, reading), bound


@functools.cache  # every instruction set has the same examples
def expected_of(
    seed: int, shape: frozenset[tuple[str, object]], reading: PageReading
) -> tuple[PagedTokens | None, Tensor]:
    """Return what is selected from what is drawn, or nothing where that is every page."""
    q, pages, bounds = drawn(seed, **dict(shape))
    found, bound = by_reference(q, pages, bounds, reading)
    return None if found is pages else found, bound


def assert_same(
    found: PagedTokens, given: tuple, wanted: tuple[PagedTokens | None, Tensor], error: float
) -> None:
    """Each page that only one of two selections reads scores as the worst that is read."""
    _, pages, bounds, reading = given
    tokens = pages.layout.tokens
    expected, bound = pages if wanted[0] is None else wanted[0], wanted[1]
    assert (found is pages) == (expected is pages)
    assert found.length.tolist() == expected.length.tolist()
    for b, h in torch.cartesian_prod(*map(torch.arange, pages.length.shape)).tolist():
        mine, other, every = (listed(each, b, h) for each in (found, expected, pages))
        at = {page: column for column, page in enumerate(every)}
        assert len(set(mine)) == len(mine) == len(other)
        assert sorted(mine, key=at.__getitem__) == mine  # in their order
        count = int(bounds.count[b, h])
        known = bound[b, h, :, :count]
        below = (known - known.amax(-1, keepdim=True)).amax(0) if count else known[0]
        of = dict(zip(every, below.tolist(), strict=False))  # of pages that are known
        length = int(pages.length[b, h])
        last = (length - reading.last) // tokens  # from there on all pages are read
        others = set(other) & set(every[-(-reading.first // tokens) : max(last, 0)])
        for page in set(mine) ^ set(other):
            least = min(of[each] for each in others if each in of)
            assert abs(of[page] - least) < error * (1 + abs(float(known.abs().amax())))


@settings(max_examples=60)
@given(st.integers(0, 99), SHAPES, READINGS)
def test_pages_are_those_of_the_definition(near, seed, shape, reading) -> None:
    q, pages, bounds = drawn(seed, **shape)
    given = q, pages, bounds, reading
    wanted = expected_of(seed, frozenset(shape.items()), reading)
    for each in (bounds, in_pages(pages, bounds)):
        found = select_pages(q, pages, each, reading)
        assert found is not None
        assert_same(found, given, wanted, max(near, 1e-5))
        if found is not pages:
            assert found.longest >= int(found.length.max())


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_bounds_of_a_layer_are_read_where_they_are(near, threads, coded) -> None:
    """Rows of a larger tensor, as the layers of a cache."""
    shape = dict(B=2, H=2, G=4, D=64, width=300, tokens=4, missing=0, reverse=False)
    q, pages, bounds = drawn(1, **shape, dtype=torch.bfloat16, coded=coded)
    every = torch.zeros(3, 2, 2, 310, bounds.both.shape[-1], dtype=bounds.both.dtype)
    every[:] = 255 if coded else torch.nan
    every[1, :, :, :300] = bounds.both
    reading, before = PageReading(Budget(25, "percent"), 4, 16), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = select_pages(q, pages, replace(bounds, both=every[1]), reading)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    given = q, pages, bounds, reading
    assert_same(found, given, by_reference(*given), max(near, 1e-5))


def test_equal_scores_and_numbers_that_are_none() -> None:
    shape = dict(B=1, H=1, G=1, D=3, width=6, tokens=1, missing=0, reverse=False)
    q, pages, bounds = drawn(2, **shape, dtype=torch.float32)
    pages = replace(pages, length=torch.tensor([[6]]), table=torch.arange(6).view(1, 1, 6).int())
    both = torch.ones_like(bounds.both)
    for backend in ("torch", "cpu"):
        arguments = q, pages, PageBounds(both, torch.tensor([[6]])), PageReading(Budget(2))
        assert selected(*arguments, backend).table[0, 0, :2].tolist() == [0, 1]
    both[0, 0, 4] = torch.nan
    for backend in ("torch", "cpu"):
        given = q, pages, PageBounds(both, torch.tensor([[6]])), PageReading(Budget(2))
        assert 4 in selected(*given, backend).table[0, 0, :2].tolist()


def test_what_native_code_does_not_read_is_left_to_torch() -> None:
    shape = dict(B=1, H=1, G=1, D=3, width=20, tokens=1, missing=0, reverse=False)
    q, pages, bounds = drawn(3, **shape, dtype=torch.float32)
    wide = replace(bounds, both=bounds.both.double())
    apart = torch.randn(1, 1, 3, 2).mT  # numbers that are not consecutive
    for queries, of in ((q.double(), bounds), (q, wide), (apart, bounds)):
        assert declined(queries, of) is not None
    assert select_pages(q.double(), pages, bounds, PageReading(Budget(2))) is None
    assert selected(q.double(), pages, bounds, PageReading(Budget(2)), "cpu").length.max() == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": torch.tensor([[21]])}, "a length is 21; it must be 0 to 20"),
        ({"count": torch.tensor([[21]])}, "a count is 21; it must be 0 to 20"),
        ({"both": torch.zeros(1, 1, 20, 5, dtype=torch.bfloat16)}, "bounds"),
        ({"both": torch.zeros(20, 5, dtype=torch.bfloat16)}, "bounds"),
        ({"both": torch.zeros(19, 6, dtype=torch.bfloat16)}, "a page of the table is 19"),
        ({"table": torch.zeros(1, 2, 20, dtype=torch.int32)}, "table"),
        ({"both": torch.zeros(1, 1, 20, 5, dtype=torch.uint8)}, "bounds"),
        ({"both": torch.zeros(19, 6, dtype=torch.uint8)}, "a page of the table is 19"),
    ],
)
def test_arguments_that_do_not_match_are_refused(change, message) -> None:
    shape = dict(B=1, H=1, G=1, D=3, width=20, tokens=1, missing=0, reverse=False)
    q, pages, bounds = drawn(3, **shape, dtype=torch.float32)
    every = torch.tensor([[20]])  # all pages are full and bounded
    held, known = {"length": every} | change, {"count": every} | change
    pages = replace(pages, **{k: v for k, v in held.items() if k in ("length", "table")})
    bounds = replace(bounds, **{k: v for k, v in known.items() if k in ("count", "both")})
    with pytest.raises(RuntimeError, match=message):
        select_pages(q, pages, bounds, PageReading(Budget(2)))


@pytest.mark.parametrize(
    ("share", "most", "message"),
    [
        (-1.0, 2, "share is -1"),
        (100.5, 2, "share is 100.5"),
        (float("nan"), 2, "share is nan"),
        (0.0, -1, "most is -1; it must be 0"),
    ],
)
def test_limits_out_of_range_are_refused(share: float, most: int, message: str) -> None:
    shape = dict(B=1, H=1, G=1, D=3, width=20, tokens=1, missing=0, reverse=False)
    q, pages, bounds = drawn(3, **shape, dtype=torch.float32)
    given = q, bounds.both, q.new_empty(0), bounds.count, pages.table, pages.length, share, most
    with pytest.raises(RuntimeError, match=message):
        torch.ops.kv_cpu.page_select(*given, 1, 0, 0, False, "plain")


def test_codes_need_a_rotation_of_their_size() -> None:
    shape = dict(B=1, H=1, G=1, D=17, width=20, tokens=4, missing=0, reverse=False, coded=True)
    q, pages, bounds = drawn(3, **shape, dtype=torch.float32)
    for rotation in (torch.zeros(17, 17), torch.zeros(16, 32), torch.zeros(0), torch.eye(32)):
        given = q, bounds.both, rotation, bounds.count, pages.table, pages.length, 0.0, 2
        with pytest.raises(RuntimeError, match="rotation"):
            torch.ops.kv_cpu.page_select(*given, 4, 0, 0, False, "plain")


def test_queries_that_are_not_finite_read_the_first_pages() -> None:
    """Of a query with an element that is no number all scores are infinite, as in torch."""
    shape = dict(B=1, H=1, G=2, D=16, width=20, tokens=4, missing=0, reverse=False, coded=True)
    q, pages, bounds = drawn(3, **shape, dtype=torch.float32)
    q[0, 0, 1, 3] = torch.nan
    for backend in ("torch", "cpu"):
        found = selected(q, pages, bounds, PageReading(Budget(12)), backend)
        assert found.table[0, 0, :2].tolist() == pages.table[0, 0, :2].tolist()
