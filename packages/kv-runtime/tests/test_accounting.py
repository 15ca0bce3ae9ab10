"""Laws of the account by which vLLM's blocks pay for pages."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_policy import Budget, CacheShape, parse
from kv_runtime.accounting import Account, chunk_budget, fit_page, kept_tokens
from kv_runtime.layout import Layout
from kv_runtime.slots import ALIGNED, LOSS

SHAPE = CacheShape(layers=3, kv_heads=2, group=2, key_dim=16, value_dim=16, dtype=torch.float32)
ONE_TIER = ("k8v4", "raw")
TIERS = (*ONE_TIER, "leankv:window=0", "leankv:window=8", "k4v2:keys=channel,block=32,window=32")


def account(text: str, block: int = 16) -> tuple[Account, Layout]:
    layout = Layout.of(parse(text), SHAPE, None, 16)
    return Account.of(layout, block), layout


class TableRow:
    """Tokens of one table row, by store: the tiers of a layout without blocks."""

    def __init__(self, layout: Layout) -> None:
        self.sizes = [tier.tokens for tier in layout.pages[0]]
        self.held = [0] * len(self.sizes)

    @property
    def pages(self) -> int:
        return sum(-(-n // size) for n, size in zip(self.held, self.sizes, strict=True))

    def step(self, draw: random.Random) -> None:
        """One token enters a tier, and some others move to later ones or out."""
        self.held[draw.randrange(len(self.held))] += 1
        for tier in range(len(self.held)):
            for _ in range(draw.choice((0, 0, 1, 5))):
                to = draw.randrange(tier + 1, len(self.held) + 1)
                if self.held[tier]:
                    self.held[tier] -= 1
                    if to < len(self.held):
                        self.held[to] += 1


@given(st.sampled_from(("k8v4", "leankv:window=0")), st.integers(0, 200), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_course_of_events_takes_more_pages_than_are_paid_for(
    text: str, before: int, seed: int
) -> None:
    book, layout = account(text)
    draw = random.Random(seed)
    table_rows = [TableRow(layout) for _ in range(SHAPE.layers * SHAPE.kv_heads)]
    for each in table_rows:
        for _ in range(before):
            each.step(draw)
    told = sum(each.pages for each in table_rows)
    assert told <= book.pages(before)
    for tokens in range(1, 40):
        for each in table_rows:
            each.step(draw)
        held = sum(each.pages for each in table_rows)
        assert held <= book.later(told, tokens)
        assert held <= book.pages(before + tokens)


@pytest.mark.parametrize("text", TIERS)
@pytest.mark.parametrize("block", [4, 16, 128])
def test_a_block_pays_for_what_its_tokens_take(text: str, block: int) -> None:
    book, layout = account(text, block)
    table_rows = SHAPE.layers * SHAPE.kv_heads
    tokens = layout.pages[0][0].tokens
    assert book.block_pages == -(-table_rows * block // tokens)
    assert book.block_bytes == book.block_pages * layout.page_bytes
    for pages in (1, book.block_pages, book.block_pages + 1, 7 * book.block_pages):
        assert book.blocks(pages) * book.block_pages >= pages
        assert (book.blocks(pages) - 1) * book.block_pages < pages
    assert book.holding(book.block_bytes + 1).block_pages == book.block_pages


@pytest.mark.parametrize("text", ONE_TIER)
def test_pages_of_one_tier_are_counted_exactly(text: str) -> None:
    book, layout = account(text)
    tokens = layout.pages[0][0].tokens
    assert tokens == 16
    for n in (0, 1, 15, 16, 17, 160, 161):
        assert book.pages(n) == 6 * -(-n // 16)
        assert book.blocks(book.pages(n)) == max(1, -(-n // 16))


def test_a_window_is_paid_for_from_the_first_token_on() -> None:
    book, layout = account("leankv:window=8")
    each = -(-8 // layout.window_layout(0).tokens)
    assert book.window_pages == 6 * each
    assert book.pages(1) == book.pages(8) == book.window_pages
    assert book.pages(9) > book.window_pages


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("k8v4", 1000),
        ("snapkv:budget=100", 100),
        ("snapkv:budget=25%", 250),
        ("kv-compress:rate=4+k8v4", 250),
    ],
)
def test_what_is_kept_of_a_prompt_is_what_the_budget_says(text: str, kept: int) -> None:
    policy = parse(text)
    found = kept_tokens(policy, 1000, Layout.of(policy, SHAPE, None, 16).token_bytes)
    assert found == kept


@given(st.lists(st.integers(0, 120), min_size=6, max_size=6), st.integers(0, 90))
@settings(max_examples=80, deadline=None)
def test_a_budget_of_chunks_is_paid_for_however_heads_share_it(held: list[int], more: int) -> None:
    book, _ = account("k8v4")
    kept = -(-sum(held) // 6)
    pages = sum(-(-n // 16) for n in held)
    assert book.later(pages, more) <= book.planned(10**6, kept, more)


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 160])
def test_no_budget_of_chunks_is_paid_for_twice(kept: int) -> None:
    book, _ = account("k8v4")
    uneven = [1] * 5 + [6 * kept - 5]
    pages = sum(-(-n // 16) for n in uneven)
    assert book.planned(10**6, kept, 0) == pages
    assert book.planned(10**6, kept, 40) == pages + 6 * 3
    assert book.planned(10**6, None, 40) == book.pages(10**6)
    assert book.planned(kept, kept, 40) == book.pages(kept)  # never more than all of its tokens


def test_only_a_budget_that_is_planned_by_chunk_bounds_a_prompt() -> None:
    assert chunk_budget(parse("k8v4")) is None
    assert chunk_budget(parse("snapkv:budget=64")) is None
    assert chunk_budget(parse("streaming:budget=64")) is None
    assert chunk_budget(parse("gate:file=smollm2-135m,threshold=0.5")) is None
    assert chunk_budget(parse("streaming:budget=64,chunks=true+k8v4")) == 64
    assert chunk_budget(parse("streaming:budget=64,chunks=true"), Budget(9)) == 9


@given(
    token=st.integers(1, 600), wanted=st.sampled_from((16, 32, 128)), nbytes=st.integers(1, 1 << 17)
)
@settings(max_examples=50, deadline=None)
def test_pages_fill_the_blocks_of_other_layers(token: int, wanted: int, nbytes: int) -> None:
    sizes = {n: n * token for n in range(wanted // 2, 2 * wanted + 1)}
    tokens, size = fit_page(sizes, wanted, nbytes)
    assert size >= nbytes
    assert size % sizes[tokens] == size % ALIGNED == 0
    fits = {
        n: found for n, page in sizes.items() if (found := -(-nbytes // page) * page) % ALIGNED == 0
    }
    least = min(fits.values())
    if size > nbytes * (1 + LOSS):
        assert size == least
    else:
        near = [n for n, found in fits.items() if found <= nbytes * (1 + LOSS)]
        assert abs(tokens - wanted) == min(abs(n - wanted) for n in near)


@pytest.mark.parametrize(
    ("page", "wanted", "nbytes", "found"),
    [
        (64, 16, 128 * 2 * 32, (16, 8192)),
        (104 + 8, 16, 128 * 256 * 2, (16, 66304)),  # 37 pages
        (392 + 8, 16, 128 * 1024, (15, 132000)),  # 22 pages
        (100, 32, 1100, (16, 1600)),  # the smallest page
    ],
)
def test_pages_beside_windows_of_usual_sizes(
    page: int, wanted: int, nbytes: int, found: tuple[int, int]
) -> None:
    sizes = {n: n * page for n in range(wanted // 2, 2 * wanted + 1)}
    assert fit_page(sizes, wanted, nbytes) == found


def test_pages_that_no_block_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="no page of 3 to 3 tokens fits blocks of 5"):
        fit_page({3: 7}, 3, 5)
