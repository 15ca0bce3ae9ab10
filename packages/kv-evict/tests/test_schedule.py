"""The schedule of pages against section 4.2.2 of KV-Compress, written out head by head."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kv_evict.schedule import offers, taken, without

INF = math.inf


@st.composite
def heads(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores [N, 1, H, L] with empty slots, and protected tokens among the others."""
    n, h, places = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 23))
    size = n * h * places
    few = draw(st.booleans())  # few distinct scores: many ties
    each = st.integers(0, 3 if few else 10**6)
    score = torch.tensor(draw(st.lists(each, min_size=size, max_size=size))).double()
    safe = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))) == 0
    held = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))) > 0
    shape = (n, 1, h, places)
    return score.masked_fill(safe, INF).view(shape), held.view(shape)


def by_hand(
    score: Tensor, held: Tensor, page: int | Tensor, excess: int
) -> dict[tuple[int, int], list]:
    """Free the cheapest page of all heads, repeatedly; return the evicted tokens by head."""
    n, _, h, _ = score.shape
    pages = torch.as_tensor(page).expand(n, h)
    left = {
        (i, j): sorted(score[i, 0, j][held[i, 0, j]].tolist())
        for i, j in product(range(n), range(h))
    }
    gone: dict[tuple[int, int], list] = {at: [] for at in left}
    freed = dict.fromkeys(left, 0)
    while excess > sum(len(x) for x in gone.values()):
        best = None
        for at, scores in left.items():
            if not scores:
                continue
            size = len(scores) % int(pages[at]) or int(pages[at])
            finite = [x for x in scores[:size] if x < INF]
            if not finite:
                continue
            # Next to protected tokens no page becomes free: such tokens are evicted last.
            price = finite[-1] if len(finite) == size else torch.finfo(torch.float64).max
            found = (price, freed[at], *at)
            if best is None or found < best[0]:
                best = found, at, finite
        if best is None:
            break
        _, at, going = best
        gone[at] += going
        freed[at] += 1
        left[at] = left[at][len(going) :]
    return gone


@given(heads(), st.integers(1, 6), st.integers(-3, 140))
def test_the_cheapest_pages_go(case: tuple[Tensor, Tensor], page: int, excess: int) -> None:
    score, held = case
    (count,) = taken([offers(score, held, torch.tensor(page))], torch.tensor([excess]))
    going = held & ~without(score, held, count)
    expected = by_hand(score, held, page, excess)
    for (i, j), scores in expected.items():
        mine = sorted(score[i, 0, j][going[i, 0, j]].tolist())
        assert mine == scores


@given(heads(), st.integers(0, 140))
def test_heads_whose_pages_hold_more_tokens(case: tuple[Tensor, Tensor], excess: int) -> None:
    score, held = case
    n, _, h, _ = score.shape
    page = torch.tensor([[2, 5, 3], [1, 4, 6]])[:n, :h]
    (count,) = taken([offers(score, held, page)], torch.tensor([excess]))
    going = held & ~without(score, held, count)
    for (i, j), scores in by_hand(score, held, page, excess).items():
        assert sorted(score[i, 0, j][going[i, 0, j]].tolist()) == scores


@given(heads(), st.integers(1, 6), st.integers(0, 140))
def test_what_goes_weighs_as_little_as_that_many_tokens_can(
    case: tuple[Tensor, Tensor], page: int, excess: int
) -> None:
    score, held = case
    (count,) = taken([offers(score, held, torch.tensor(page))], torch.tensor([excess]))
    going = held & ~without(score, held, count)
    assert torch.equal(going.sum(-1), count)
    assert not (going & score.isinf()).any()
    for i, j in product(range(score.shape[0]), range(score.shape[2])):
        mine = score[i, 0, j][held[i, 0, j]]
        best = mine.sort().values[: int(count[i, 0, j])].sum()
        assert score[i, 0, j][going[i, 0, j]].sum() == best


@given(heads(), st.integers(1, 6), st.integers(0, 140))
def test_whole_pages_come_free_unless_a_page_is_protected(
    case: tuple[Tensor, Tensor], page: int, excess: int
) -> None:
    score, held = case
    held &= score.isfinite()  # nothing protected
    (count,) = taken([offers(score, held, torch.tensor(page))], torch.tensor([excess]))
    left = held.sum(-1) - count
    assert bool(((count == 0) | (left % page == 0)).all())
    enough = min(excess, int(held.sum()))
    assert enough <= int(count.sum()) < enough + page


def test_sequences_share_nothing() -> None:
    score = torch.rand(2, 3, 2, 33, dtype=torch.float64)
    held = torch.rand(2, 3, 2, 33) > 0.2
    excess = torch.tensor([40, 0, 90])
    (count,) = taken([offers(score, held, torch.tensor(4))], excess)
    for b in range(3):
        (alone,) = taken(
            [offers(score[:, b : b + 1], held[:, b : b + 1], torch.tensor(4))], excess[b : b + 1]
        )
        assert torch.equal(alone[:, 0], count[:, b])


def test_equal_scores_go_evenly() -> None:
    score = torch.ones(2, 1, 3, 32)
    held = torch.ones(2, 1, 3, 32, dtype=torch.bool)
    (count,) = taken([offers(score, held, torch.tensor(4))], torch.tensor([6 * 8]))
    assert count.flatten().tolist() == [8] * 6
    going = held & ~without(score, held, count)
    assert torch.equal(going[0, 0, 0].nonzero().flatten(), torch.arange(24, 32))  # later ones


def test_tiers_free_pages_of_their_own_sizes() -> None:
    score = torch.tensor([9.0, 8, 7, 6, 1, 2, 3, 4, 5, 0])[None, None, None]
    high = torch.tensor([True] * 4 + [False] * 6)[None, None, None]
    each = [offers(score, high, torch.tensor(2)), offers(score, ~high, torch.tensor(3))]
    first, second = taken(each, torch.tensor([4]))
    assert (first.item(), second.item()) == (0, 6)  # 3 pay 2, the next 3 pay 5; high has 7
    first, second = taken(each, torch.tensor([7]))
    assert (first.item(), second.item()) == (2, 6)


@pytest.mark.parametrize("excess", [0, -5])
def test_nothing_goes_where_there_is_nothing_too_many(excess: int) -> None:
    score = torch.rand(1, 1, 2, 9)
    (count,) = taken(
        [offers(score, torch.ones_like(score).bool(), torch.tensor(4))], torch.tensor([excess])
    )
    assert not count.any()


def test_an_empty_head_offers_nothing() -> None:
    score = torch.rand(1, 1, 2, 9)
    held = torch.ones_like(score).bool()
    held[0, 0, 1] = False
    (count,) = taken([offers(score, held, torch.tensor(4))], torch.tensor([100]))
    assert count.flatten().tolist() == [9, 0]
