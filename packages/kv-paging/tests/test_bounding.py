"""Bounds of keys by Triton's kernel: bit by bit those of torch, and without a read by the host."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounded_world import CODED, IN_PAGES, LAYOUT, World
from key_code_reference import check_codes, codes_in
from kv_paging import PagePool, Tiers, torch_kernels, triton_kernels
from kv_policy import PagedTokens, PageLayout
from kv_policy.key_codes import MOST_CODED_DIM, code_bytes
from page_twins import vectors
from triton_cases import Both, form, one_store

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
KINDS = ["8", "4", "2/8", "4/3", "1", "float32", "float16", "bfloat16"]
CASES = given(
    seed=st.integers(0, 99),
    kind=st.sampled_from(KINDS),
    dim=st.sampled_from([1, 5, 32, 65]),
    tokens=st.sampled_from([1, 3, 16, 20]),
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    most=st.sampled_from([1, 2, 9]),
    holes=st.booleans(),
    by_page=st.booleans(),
)


def filled(kind: str, dim: int, tokens: int, lengths: list[int], seed: int) -> Both:
    """Stores of both kernels, whose rows have these lengths."""
    g = torch.Generator().manual_seed(seed)
    layout = PageLayout.sized(form(kind, "4", dim, 3), tokens, True, True)
    both = one_store(layout, len(lengths))
    most = max(lengths)
    key = vectors(g, len(lengths), most, dim, strange=kind == "float32")
    keep = torch.arange(most) < torch.tensor(lengths)[:, None]
    place = torch.randint(-2, 9, keep.shape, generator=g).int()
    value = vectors(g, len(lengths), most, 3)
    both.do("append", torch.arange(len(lengths)), key, value, keep, keep.float(), place)
    return both


def bounded(
    whole: PagedTokens, kernels: object, count: torch.Tensor, most: int, *, by_page: bool = False
) -> torch.Tensor:
    tokens, dim = whole.layout.tokens, whole.layout.format.key.dim
    lead = (len(count), whole.table.shape[2] + 1)
    both = torch.full((*lead, 2 * dim), 7, dtype=torch.bfloat16).to(count.device)
    assert whole.longest <= both.shape[1] * tokens
    if by_page:  # pages are aligned
        both = both.new_full((len(whole.data), 2 * dim + -2 * dim % 8 + 8), 7)[:, : 2 * dim]
    kernels.bound(whole, count, both, most)
    return both.cpu()


@settings(max_examples=30, deadline=None, derandomize=True)
@CASES
def test_bounds_are_those_of_torch(seed, kind, dim, tokens, lengths, most, holes, by_page) -> None:
    """Of the pages that have none; others keep theirs. Slots of no position are empty."""
    both = filled(kind, dim, tokens, [*lengths, 1], seed)
    found = []
    for store, kernels in zip(both.each, (torch_kernels, triton_kernels), strict=True):
        whole = replace(store.whole(), holes=holes)
        full = store.length.flatten().long() // tokens
        g = torch.Generator().manual_seed(seed)
        count = (torch.rand(len(full), generator=g).to(full.device) * full).long()
        found.append(bounded(whole, kernels, count, most, by_page=by_page))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=30, deadline=None, derandomize=True)
@CASES
def test_codes_are_of_the_stored_keys(
    seed, kind, dim, tokens, lengths, most, holes, by_page
) -> None:
    """Of the pages that have none; others keep theirs. Slots of no position are empty."""
    check_coded(seed, kind, dim, tokens, lengths, most, holes, by_page)


@pytest.mark.parametrize("kind", ["8", "float32"])
@pytest.mark.parametrize("dim", [256, MOST_CODED_DIM])
def test_codes_of_long_keys(kind, dim) -> None:
    check_coded(1, kind, dim, 16, [40, 3], 2, False, True)


def check_coded(
    seed: int,
    kind: str,
    dim: int,
    tokens: int,
    lengths: list[int],
    most: int,
    holes: bool,
    by_page: bool,
) -> None:
    """Encode the keys of new stores, and compare codes with the keys that are stored."""
    _, store = filled(kind, dim, tokens, [*lengths, 1], seed).each
    whole, nbytes = replace(store.whole(), holes=holes), code_bytes(dim, tokens)
    full = store.length.flatten().long() // tokens
    g = torch.Generator().manual_seed(seed)
    count = (torch.rand(len(full), generator=g).to(full.device) * full).long()
    lead: tuple[int, ...] = (len(count), whole.table.shape[2] + 1)
    codes = torch.full((*lead, nbytes), 7, dtype=torch.uint8, device=count.device)
    if by_page:  # pages are aligned
        codes = codes.new_full((len(whole.data), nbytes + -nbytes % 16 + 16), 7)[:, :nbytes]
    triton_kernels.bound(whole, count, codes, most)
    every = torch.arange(len(full), device=full.device)
    found = torch_kernels.read(whole, every, int(full.max()) * tokens, frozenset({"keys"}))
    assert found.key is not None
    written = torch.zeros(codes.shape[:-1], dtype=torch.bool)
    for row, (first, last) in enumerate(zip(count.tolist(), full.tolist(), strict=True)):
        for column in range(first, last):
            at = (row, column)
            if by_page:
                at = (int(whole.table.flatten(0, 1)[row, column]),)
            written[at] = True
            slots = slice(column * tokens, (column + 1) * tokens)
            held = found.held[row, slots].cpu()
            page, key = codes[at].cpu(), found.key[row, slots].cpu()
            if held.any():
                check_codes(page, key.where(held[:, None], key[int(held.int().argmax())]))
            else:
                assert codes_in(page, tokens, dim)[1].tolist() == [0] * tokens
    assert (codes.cpu()[~written] == 7).all()


@pytest.mark.parametrize("layout", [LAYOUT, IN_PAGES, CODED], ids=["beside", "inside", "codes"])
def test_a_store_knows_which_pages_have_none(layout: PageLayout) -> None:
    """After random operations, as `test_key_bounds` does; each page is bounded in one launch."""
    world = World.of(5, kernels="triton", layout=layout)
    world.append(9)
    world.update()
    for operation in (World.grow, World.append, World.compact, World.replace, World.select):
        operation(world)
        world.update()
    for _ in range(5):
        world.grow()
        world.update()


def test_a_step_reads_nothing_on_the_host() -> None:
    """Everything is on `meta`, where a read raises."""
    layout = PageLayout.sized(form("8", "4", 5, 3), 4)
    tiers = Tiers(PagePool(layout.nbytes, 8), [layout], 2, 2, 2)
    store = tiers.stores[0]
    store.keep_bounds()
    whole = replace(store.whole(), longest=40)
    names = ("data", "table", "length")
    whole = replace(whole, **{name: getattr(whole, name).to("meta") for name in names})
    bounds, launches = store.bounds, []

    def noted(pages: PagedTokens, count: torch.Tensor, both: torch.Tensor, most: int) -> None:
        launches.append(most)

    bounds.both, bounds.count = bounds.both.to("meta"), bounds.count.to("meta")
    with patch.object(triton_kernels, "bound", noted):
        for changes in (3, 3, 4, 4):
            bounds.update(whole, triton_kernels, changes)
        bounds.cut(torch.arange(2, device="meta"), torch.zeros(2, dtype=torch.long, device="meta"))
        bounds.update(whole, triton_kernels, 4)
    assert launches == [10, 1, 10, 1, 10]  # pages of a row that may have none
    assert bounds.both.shape[1] >= 10
