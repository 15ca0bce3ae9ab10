"""The selection of pages in Triton, compared with its definition, and what the host reads."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, random_case
from kernel_keys import compiled_keys, misaligned
from kv_attention import PageBounds, logit_bounds, select_pages
from kv_attention.gpu.backend import selection_declined
from kv_attention.page_bounds import code_logits
from kv_attention.page_selection import most_read, selected
from kv_attention.reading_reference import select_pages as by_definition
from kv_policy import Budget, PagedTokens, PageLayout, PageReading, RawCodec, TokenFormat
from kv_policy.key_codes import code_rotation, code_rows
from launched_kernels import Operations, launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = Budget(100, "percent")
BUDGETS = [ALL, Budget(50, "percent"), Budget(100 / 3, "percent"), Budget(3, "percent")]
READINGS = st.builds(
    PageReading,
    st.sampled_from([*BUDGETS, Budget(1), Budget(30), Budget(99)]),
    st.sampled_from([0, 1, 40]),
    st.sampled_from([0, 1, 70]),
)
SHAPES = st.fixed_dictionaries(
    {
        "B": st.integers(1, 2),
        "H": st.integers(1, 2),
        "G": st.sampled_from([1, 2, 4, 5, 9]),
        "D": st.sampled_from([1, 3, 16, 40]),
        "width": st.sampled_from([1, 3, 20, 130]),
        "tokens": st.sampled_from([1, 4, 7, 16]),
        "missing": st.sampled_from([0, 0, 2]),
        "reverse": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    }
)
Given = tuple[Tensor, PagedTokens, PageBounds]


def drawn(
    seed: int,
    *,
    B: int = 1,
    H: int = 1,
    G: int = 1,
    D: int = 3,
    width: int = 20,
    tokens: int = 4,
    missing: int = 0,
    reverse: bool = False,
    dtype: torch.dtype = torch.float32,
    whole: bool = False,
    coded: bool = False,
) -> Given:
    """Draw queries, table rows without tokens, and bounds; `whole` numbers have exact sums.

    `coded`: codes of keys in place of bounds.
    """
    g = torch.Generator().manual_seed(seed)
    form = TokenFormat(RawCodec(D, torch.float32), RawCodec(1, torch.float32))
    layout = PageLayout.sized(form, tokens)
    table = torch.randperm(B * H * width, generator=g).view(B, H, width).int()
    length = torch.randint(0, width * tokens + 1, (B, H), generator=g)
    longest = min(int(length.max()) + int(torch.randint(0, 9, (), generator=g)), width * tokens)
    data = torch.zeros(1, layout.nbytes, dtype=torch.uint8)
    pages = PagedTokens(data, table, length, layout, reverse, longest=longest)
    centre, half = torch.randn(2, B, H, width, D, generator=g).unbind(0)
    q = torch.randn(B, G, H, D, generator=g).transpose(1, 2)  # not contiguous
    if whole:
        centre, half, q = ((2 * x).round() for x in (centre, half, q))
    both = torch.cat((centre + half.abs(), centre - half.abs()), -1).bfloat16()
    if coded:
        nbytes = 4 * code_rows(D) * tokens
        codes = torch.randint(0, 256, (B, H, width, nbytes), generator=g, dtype=torch.uint8)
        scale = (0.2 + torch.rand(B, H, width, tokens, generator=g)).half()
        both = torch.cat((codes, scale.view(torch.uint8)), -1)
    count = (length // tokens - missing).clamp(min=0)
    known = torch.arange(width) < count[..., None]
    nothing = 255 if coded else torch.nan  # memory that nothing was written to
    both = both.masked_fill(~known[..., None], nothing)
    return q.to(dtype), pages, PageBounds(both, count, missing)


def in_pages(pages: PagedTokens, bounds: PageBounds) -> PageBounds:
    """Return the same bounds by page, with NaN in pages that have none; rows are aligned."""
    *_, width, dims = bounds.both.shape
    wide, nothing = dims + -dims % 16 + 16, 255 if bounds.coded else torch.nan
    every = torch.full((pages.table.numel(), wide), nothing, dtype=bounds.both.dtype)
    table = pages.table.flip(2) if pages.reverse else pages.table
    every[table[..., :width].flatten().long(), :dims] = bounds.both.flatten(0, 2)
    return replace(bounds, both=every[:, :dims])


def on(device: str, q: Tensor, pages: PagedTokens, bounds: PageBounds) -> Given:
    moved = replace(
        pages, **{name: getattr(pages, name).to(device) for name in ("data", "table", "length")}
    )
    return (
        q.to(device),
        moved,
        replace(bounds, both=bounds.both.to(device), count=bounds.count.to(device)),
    )


def found_by(given: Given, reading: PageReading) -> PagedTokens:
    assert selection_declined(given[0].to(DEVICE), given[2]) is None
    _, found, _ = on(
        "cpu", given[0], select_pages(*on(DEVICE, *given), reading, "triton"), given[2]
    )
    return found


def listed(pages: PagedTokens) -> list[list[int]]:
    """List the pages of each table row."""
    rows = zip(pages.table.flatten(0, 1), pages.length.flatten().tolist(), strict=True)
    tokens = pages.layout.tokens
    flipped = ((row.flip(0) if pages.reverse else row, length) for row, length in rows)
    return [row[: -(-length // tokens)].tolist() for row, length in flipped]


@settings(max_examples=40)
@given(st.integers(0, 999), SHAPES, READINGS, st.booleans(), st.booleans())
def test_pages_are_those_of_the_definition(seed, shape, reading, told, inside) -> None:
    """Sums are exact, and many scores equal: the first of these pages are read."""
    q, pages, bounds = drawn(seed, **shape, whole=True)
    given = q, pages, bounds if told else replace(bounds, missing=None)
    expected = by_definition(*given, reading)
    if inside:
        given = q, pages, in_pages(pages, given[2])
        assert listed(by_definition(*given, reading)) == listed(expected)
    for found in (found_by(given, reading), selected(*given, reading, waits=False)):
        assert listed(found) == listed(expected)
        assert found.length.tolist() == expected.length.tolist()
        assert found.length.dtype == pages.length.dtype
        assert found.longest >= int(found.length.max())
        assert found.table.shape[2] * found.layout.tokens >= found.longest
        if found is not pages:
            behind = torch.arange(found.table.shape[2]) * found.layout.tokens
            behind = behind >= found.length[..., None]
            known = pages.table if found.reverse else found.table
            assert ((known >= 0) & (known < pages.table.numel())).all()  # all entries are pages
            assert behind.shape == found.table.shape


@settings(max_examples=60)
@given(st.integers(0, 999), SHAPES, READINGS, st.booleans(), st.booleans())
def test_a_page_that_is_read_in_place_of_another_is_as_good(
    seed, shape, reading, coded, inside
) -> None:
    q, pages, bounds = given = drawn(seed, **shape, coded=coded)
    if inside:
        given = q, pages, in_pages(pages, bounds)
    found, expected = found_by(given, reading), by_definition(*given, reading)
    assert found.length.tolist() == expected.length.tolist()
    rows = zip(listed(found), listed(expected), listed(pages), strict=True)
    tokens = pages.layout.tokens
    upper = code_logits(q.double(), bounds.both, tokens) if coded else None
    upper = logit_bounds(q.double(), bounds.both) if upper is None else upper
    upper = upper.flatten(0, 1)
    count = bounds.count.flatten().tolist()
    for r, (mine, other, every) in enumerate(rows):
        assert sorted(mine, key=every.index) == mine  # in their order, each once
        assert len(set(mine)) == len(mine)
        known = upper[r, :, : count[r]]
        if not known.numel() or mine == other:
            assert mine == other
            continue
        below = (known - known.amax(-1, keepdim=True)).amax(0)
        of = {page: float(below[i]) for i, page in enumerate(every[: count[r]])}
        last = (int(pages.length.flatten()[r]) - reading.last) // tokens  # all are read from there
        ranked = set(other) & set(every[-(-reading.first // tokens) : max(last, 0)])
        least = min(of[page] for page in ranked if page in of)
        for page in set(mine) ^ set(other):
            assert abs(of[page] - least) < 1e-5 * (1 + float(known.abs().amax()))


@pytest.mark.parametrize(
    ("D", "G", "tokens"),
    [(144, 17, 4), (256, 3, 16), (17, 33, 80), (128, 4, 33)],
    ids=["parts", "wide", "long-pages", "odd-pages"],
)
def test_codes_of_long_keys_large_groups_and_long_pages(D, G, tokens) -> None:
    """Of which kernels take several parts."""
    given = drawn(8, B=2, G=G, D=D, width=12, tokens=tokens, coded=True)
    reading = PageReading(Budget(40, "percent"), 1, 1)
    assert listed(found_by(given, reading)) == listed(by_definition(*given, reading))
    inside = given[0], given[1], in_pages(given[1], given[2])
    assert listed(found_by(inside, reading)) == listed(by_definition(*given, reading))


@pytest.mark.parametrize("budget", [Budget(25, "percent"), Budget(1500), Budget(7)])
def test_rows_of_more_pages_than_an_iteration_has(budget) -> None:
    given = drawn(7, B=2, H=2, G=3, width=2500, tokens=1, whole=True)
    reading = PageReading(budget, 4, 16)
    assert listed(found_by(given, reading)) == listed(by_definition(*given, reading))


def test_bounds_of_a_layer_are_read_where_they_are() -> None:
    """Rows of a larger tensor, as the layers of a cache, with more columns than pages."""
    q, pages, bounds = drawn(4, B=2, H=2, G=2, D=5, whole=True)
    reading = PageReading(Budget(50, "percent"), 1, 1)
    every = torch.full((3, 2, 2, 30, 10), torch.nan, dtype=torch.bfloat16)
    every[1, :, :, :20] = bounds.both
    expected = listed(by_definition(q, pages, bounds, reading))
    assert listed(found_by((q, pages, replace(bounds, both=every[1])), reading)) == expected
    beside = misaligned(bounds.both)
    assert listed(found_by((q, pages, replace(bounds, both=beside)), reading)) == expected
    inside = in_pages(pages, bounds)
    assert listed(found_by((q, pages, inside), reading)) == expected
    apart = replace(inside, both=misaligned(inside.both))  # is copied
    assert listed(found_by((q, pages, apart), reading)) == expected


@pytest.mark.parametrize("reverse", [False, True])
def test_bounds_in_pages_are_found_by_their_numbers(reverse) -> None:
    q, pages, bounds = drawn(6, B=2, H=2, G=2, D=5, reverse=reverse, whole=True)
    reading = PageReading(Budget(30, "percent"))
    expected = listed(by_definition(q, pages, bounds, reading))
    assert expected != listed(pages)
    given = q, pages, in_pages(pages, bounds)
    for found in (
        found_by(given, reading),
        selected(*given, reading),
        by_definition(*given, reading),
    ):
        assert listed(found) == expected


@pytest.mark.parametrize("name", ["many", "holes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_over_the_pages_read(name, dtype) -> None:
    """What is not read is NaN; a page as good as another may be read in its place."""
    more = {"holes": True, "reverse": True, "page": 7} if name == "holes" else {"page": 16, "G": 5}
    case = random_case(
        5, L=1, B=3, D=17, Dv=9, tiers=[("8", "4")], stored=150, window=3, dtype=dtype, **more
    )
    (pages,) = case.pages
    tokens = pages.layout.tokens
    both = torch.randn(*pages.table.shape, 17).abs()
    bounds = PageBounds(torch.cat((both, -both), -1).bfloat16(), pages.length.long() // tokens, 0)
    given = case.q[:, :, :, 0], pages, bounds
    some = found_by(given, PageReading(Budget(30), 4, 16))
    assert (some.length < pages.length).any()
    data = torch.full_like(pages.data, 255)
    for row in listed(some):
        data[row] = pages.data[row]
    poisoned = replace(case, pages=[replace(some, data=data)])
    found = moved(poisoned).attend(backend="triton").out.cpu().double()
    expected = replace(case, pages=[some]).attend(backend="reference").out.double()
    assert found.isfinite().all()
    error = (found - expected).norm() / expected.norm()
    assert error < (2e-6 if dtype == torch.float32 else 6e-3)


def moved(case: Case) -> Case:
    return case.to(DEVICE)


def test_a_share_of_all_pages_is_known_without_a_launch() -> None:
    q, pages, bounds = drawn(3, B=2, H=2, G=2)
    with launched() as kernels:
        assert select_pages(q, pages, bounds, PageReading(ALL), "triton") is pages
        assert select_pages(q, pages, bounds, PageReading(Budget(10**6)), "triton") is pages
    assert not kernels


@pytest.mark.parametrize("coded", [False, True])
def test_a_selection_takes_two_launches_and_the_host_reads_nothing(coded) -> None:
    """Everything is on `meta`, where a read raises. Queries are rotated in another launch."""
    q, pages, bounds = drawn(3, B=2, H=2, G=2, D=16, coded=coded)
    code_rotation(16, torch.device("meta"))  # as whoever keeps codes does
    pages = replace(pages, length=pages.length.int())
    given = on("meta", q.contiguous(), pages, bounds)
    reading = PageReading(Budget(50, "percent"), 4, 16)
    with (
        patch("kv_attention.gpu.backend.selection_declined", lambda q, bounds: None),
        launched() as kernels,
        Operations() as operations,
    ):
        found = select_pages(*given, reading, "triton")
    before = ["rotate_kernel", "code_logits_kernel"] if coded else ["bound_logits_kernel"]
    assert [name for name, _ in kernels] == [*before, "select_pages_kernel"]
    assert {device for _, device in kernels} == {torch.device("meta")}
    views = {"as_strided", "slice", "unsqueeze", "view", "detach"}
    assert set(operations.found) <= {"empty", "empty_like", *views}
    most = most_read(reading, pages.longest, 4, 0)
    assert found.table.shape[2] == most + 1 < pages.table.shape[2]


def test_what_kernels_do_not_select_is_selected_without_a_read() -> None:
    q, pages, bounds = drawn(3, B=2, H=2, G=2, D=16)
    given = on("meta", q.double(), pages, bounds)
    for reading in (PageReading(Budget(9), 4, 16), PageReading(Budget(100 / 3, "percent"))):
        found = select_pages(*given, reading, "triton")
        assert found.table.shape[2] == most_read(reading, pages.longest, 4, 0) + 1
    assert selection_declined(q.double(), bounds) is not None
    assert selection_declined(q, replace(bounds, both=bounds.both.float())) is not None


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_equal_scores_and_numbers_that_are_none() -> None:
    q, pages, bounds = drawn(2, width=6, tokens=1)
    pages = replace(
        pages, length=torch.tensor([[6]]), table=torch.arange(6).view(1, 1, 6).int(), longest=6
    )
    both, reading = torch.ones_like(bounds.both), PageReading(Budget(2))
    for strange, expected in ((None, [0, 1]), (torch.nan, [0, 4])):
        if strange is not None:
            both[0, 0, 4] = strange
        given = q, pages, PageBounds(both, torch.tensor([[6]]), 0)
        for backend in ("torch", "triton"):
            assert select_pages(*given, reading, backend).table[0, 0, :2].tolist() == expected
    both[0, 0, 2], both[0, 0, 4] = torch.inf, -torch.inf
    assert 2 in listed(found_by(given, reading))[0]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_query_that_is_not_finite_reads_the_first_pages() -> None:
    for strange in (torch.nan, torch.inf, -torch.inf):
        q, pages, bounds = drawn(2, G=2, D=17, tokens=4, coded=True)
        q[0, 0, 1, 3] = strange
        given, reading = (q, pages, bounds), PageReading(Budget(12))
        expected = [listed(pages)[0][:2]]
        for found in (found_by(given, reading), selected(*given, reading)):
            assert [row[:2] for row in listed(found)] == expected


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("D", [128, 40, 5])
def test_kernels_are_compiled_once(D, coded) -> None:
    reading = PageReading(Budget(12.5, "percent"), 4, 16)
    with compiled_keys() as keys:
        for B, width in ((1, 3), (2, 17), (16, 64), (3, 100)):
            given = dict(B=B, H=2, G=4, D=D, width=width, dtype=torch.bfloat16)
            q, pages, bounds = drawn(B, **given, coded=coded)
            pages = replace(pages, longest=4 * width)
            for made in (False, True):
                if made:
                    pages = replace(
                        pages, table=misaligned(pages.table), length=misaligned(pages.length)
                    )
                    bounds = replace(
                        bounds, both=misaligned(bounds.both), count=misaligned(bounds.count)
                    )
                select_pages(q, pages, bounds, reading, "triton")
    before = ["rotate_kernel", "code_logits_kernel"] if coded else ["bound_logits_kernel"]
    names = [*before, "select_pages_kernel"]
    assert {name: len(found) for name, found in keys.items()} == dict.fromkeys(names, 1)
