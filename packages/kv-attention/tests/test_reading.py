"""The pages that a decode step reads, compared with a plain loop, and with attention over them."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, random_case
from kv_attention import PageBounds, logit_bounds, select_pages
from kv_attention.page_bounds import code_logits, decoded_keys, page_scores
from kv_policy import Budget, PagedTokens, PageReading
from kv_policy.key_codes import code_rotation

ALL = Budget(100, "percent")
READINGS = st.builds(
    PageReading,
    st.sampled_from([ALL, Budget(50, "percent"), Budget(12.5, "percent"), Budget(1), Budget(9)]),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([0, 1, 6]),
)
SHAPES = st.fixed_dictionaries(
    {
        "B": st.integers(1, 2),
        "H": st.integers(1, 2),
        "G": st.integers(1, 4),
        "D": st.sampled_from([1, 3, 8, 17]),
        "stored": st.sampled_from([0, 1, 5, 19, 40]),
        "page": st.sampled_from([1, 4, 7]),
        "ragged": st.booleans(),
        "reverse": st.booleans(),
        "holes": st.booleans(),
        "known": st.booleans(),
        "softcap": st.sampled_from([None, 1.5]),
        "sinks": st.booleans(),
    }
)


def drawn(seed: int, dtype: torch.dtype = torch.float64, **shape: object) -> Case:
    return random_case(seed, L=1, tiers=(("8", "4"),), window=3, dtype=dtype, **shape)


def keys_of(pages: PagedTokens, b: int, h: int) -> Tensor:
    """Decode the keys of a table row, in full pages; of empty slots too."""
    layout, form = pages.layout, pages.layout.format
    columns = range(-(-int(pages.length[b, h]) // layout.tokens))
    width = pages.table.shape[2]
    at = [width - 1 - i if pages.reverse else i for i in columns]
    rows = pages.data[pages.table[b, h, at].long()]
    parts = zip(layout.segments, form.key.parts, strict=False)
    data = [rows[:, at : at + n * size].reshape(-1, size) for (at, n, _), size in parts]
    return form.key.decode(torch.cat(data, 1))[:, 0].double()


def bounds_of(case: Case, missing: int = 0) -> PageBounds:
    """Return the bounds of the full pages but the last `missing`, in float64."""
    (pages,) = case.pages
    tokens, dim = pages.layout.tokens, pages.layout.format.key.dim
    lead = pages.length.shape
    both = torch.full((*lead, pages.table.shape[2], 2 * dim), torch.nan, dtype=torch.float64)
    count = (pages.length.long() // tokens - missing).clamp(min=0)
    for b in range(lead[0]):
        for h in range(lead[1]):
            keys = keys_of(pages, b, h)
            gone = case.page_positions[0][b, h, : len(keys), None] < 0
            for at in range(int(count[b, h])):
                mine = slice(at * tokens, (at + 1) * tokens)
                high, low = (keys[mine].masked_fill(gone[mine], x) for x in (-1e30, 1e30))
                both[b, h, at] = torch.cat((high.amax(0), low.amin(0)))
    return PageBounds(both, count)


def codes_of(case: Case, seed: int, missing: int = 0) -> PageBounds:
    """Return random codes of the keys in full pages but the last `missing`, 255 in others."""
    (pages,) = case.pages
    tokens, dim = pages.layout.tokens, pages.layout.format.key.dim
    g, rows = torch.Generator().manual_seed(seed), -(-dim // 16)
    lead = (*pages.length.shape, pages.table.shape[2])
    codes = torch.randint(0, 256, (*lead, 4 * rows * tokens), generator=g, dtype=torch.uint8)
    scale = torch.rand(*lead, tokens, generator=g).half().view(torch.uint8)
    count = (pages.length.long() // tokens - missing).clamp(min=0)
    known = torch.arange(lead[2]) < count[..., None]
    both = torch.cat((codes, scale), -1).masked_fill(~known[..., None], 255)
    return PageBounds(both, count)


def query(case: Case) -> Tensor:
    return case.q[:, :, :, 0]


def read(pages: PagedTokens) -> list[list[int]]:
    """List the pages of each table row."""
    tokens = pages.layout.tokens
    lengths = pages.length.flatten().tolist()
    rows = zip(pages.table.flatten(0, 1), lengths, strict=True)
    if pages.reverse:
        rows = ((row.flip(0), length) for row, length in rows)
    return [row[: -(-length // tokens)].tolist() for row, length in rows]


@settings(max_examples=120)
@given(st.integers(0, 99), SHAPES, READINGS, st.sampled_from([0, 0, 2]), st.booleans())
def test_pages_are_those_of_the_plain_loop(seed, shape, reading, missing, coded) -> None:
    case = drawn(seed, **shape)
    (pages,) = case.pages
    bounds = codes_of(case, seed, missing) if coded else bounds_of(case, missing)
    given = query(case), pages, bounds, reading
    found, expected = (select_pages(*given, each) for each in ("torch", "reference"))
    assert (found is pages) == (expected is pages)
    assert read(found) == read(expected)
    assert found.length.tolist() == expected.length.tolist()
    assert found.longest is None or found.longest >= int(found.length.max())


@settings(max_examples=40)
@given(st.integers(0, 99), SHAPES)
def test_no_logit_exceeds_the_bound_of_its_page(seed, shape) -> None:
    case = drawn(seed, **shape | {"holes": False})
    (pages,) = case.pages
    bounds, q = bounds_of(case), query(case)
    found, tokens = logit_bounds(q, bounds.both), pages.layout.tokens
    for b, h in torch.cartesian_prod(*map(torch.arange, pages.length.shape)).tolist():
        logits = q[b, h] @ keys_of(pages, b, h).mT
        for at in range(int(bounds.count[b, h])):
            mine = logits[:, at * tokens : (at + 1) * tokens]
            assert (mine <= found[b, h, :, at, None] + 1e-9).all()
            if tokens == 1:
                torch.testing.assert_close(mine[:, 0], found[b, h, :, at])


def test_codes_are_decoded_some_pages_at_a_time() -> None:
    case = drawn(3, B=2, H=2, G=2, D=17, stored=40, page=4)
    codes, q = codes_of(case, 3).both.masked_fill(codes_of(case, 3).both == 255, 0), query(case)
    whole = code_logits(q, codes, 4)
    key = decoded_keys(codes, 17, 4).double()
    rotated = q @ code_rotation(17, q.device).double()
    step = rotated.abs().amax(-1, keepdim=True) / 127
    rotated = (rotated / step).round() * step
    logits = torch.einsum("bhgd,bhtld->bhgtl", rotated, key)
    torch.testing.assert_close(whole, logits.amax(-1))
    for some in (1, 500):
        with patch("kv_attention.page_bounds.DECODED", some):
            torch.testing.assert_close(code_logits(q, codes, 4), whole)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@settings(max_examples=30)
@given(st.integers(0, 99), SHAPES, READINGS)
def test_attention_is_over_the_tokens_of_the_pages_read(backend, seed, shape, reading) -> None:
    """Pages that are not read are NaN, and the others are attended to as a cache of their own."""
    case = drawn(seed, **shape)
    (pages,) = case.pages
    some = select_pages(query(case), pages, bounds_of(case), reading, backend)
    data = torch.full_like(pages.data, 255)
    for row in read(some):
        data[row] = pages.data[row]
    poisoned = replace(case, pages=[replace(some, data=data)]).attend(backend="torch").out
    longest = max(1, max(map(len, read(some))))
    table = torch.tensor([row + [-1] * (longest - len(row)) for row in read(some)])
    alone = replace(
        pages, table=table.view(*pages.length.shape, -1), length=some.length, reverse=False
    )
    expected = replace(case, pages=[replace(alone, longest=None)]).attend(backend="reference").out
    torch.testing.assert_close(poisoned, expected, rtol=1e-10, atol=1e-10)
    assert poisoned.isfinite().all()


@settings(max_examples=30)
@given(st.integers(0, 99), SHAPES, st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_share_of_all_pages_changes_nothing(seed, shape, dtype) -> None:
    case = drawn(seed, dtype, **shape)
    (pages,) = case.pages
    for backend in ("torch", "reference"):
        reading = PageReading(ALL)
        assert select_pages(query(case), pages, bounds_of(case), reading, backend) is pages


def test_rows_that_are_read_whole_keep_their_pages_in_order_beside_others() -> None:
    case = random_case(3, L=1, stored=40, page=4, ragged=False)
    pages = replace(case.pages[0], length=torch.tensor([[4, 10], [40, 40]]))
    some = select_pages(query(case), pages, bounds_of(case), PageReading(Budget(12)))
    assert some.length.tolist() == [[4, 10], [12, 12]]
    assert read(some)[:2] == read(pages)[:2]


def test_every_query_of_a_group_has_its_best_page_read_first() -> None:
    """A query with long vectors does not decide for the others."""
    both = torch.zeros(1, 1, 3, 4)
    both[0, 0, :, :2] = torch.tensor([[5.0, 0.0], [4.0, 0.0], [0.0, 1.0]])
    bounds = PageBounds(both, torch.tensor([[3]]))
    q = torch.tensor([[[[100.0, 0.0], [0.0, 0.1]]]])
    scores = page_scores(q, bounds, 3, 1)[0, 0]
    assert scores.topk(2).indices.sort().values.tolist() == [0, 2]


def test_a_bound_that_is_not_a_number_is_read_and_so_is_a_page_without_bounds() -> None:
    both = torch.zeros(1, 1, 4, 4)
    both[0, 0, 1] = torch.nan
    scores = page_scores(torch.ones(1, 1, 1, 2), PageBounds(both, torch.tensor([[3]])), 5, 1)
    assert scores[0, 0, 1] == scores[0, 0, 3] == scores[0, 0, 4] == torch.inf
