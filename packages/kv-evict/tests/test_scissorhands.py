import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import SHAPE, best, planned, quick, ragged, step, worth
from kv_evict import Scissorhands
from kv_policy import DROP, Budget, LayerView, Observe, parse
from kv_policy.testing import check_policy


def view_of(
    position: Tensor, before: list[int], length: list[int], mass: Tensor, seen: Tensor, old: Tensor
) -> LayerView:
    """The tokens from `before` on are fresh."""
    fresh = position >= torch.tensor(before)[:, None, None]
    return LayerView(
        layer=torch.zeros_like(torch.tensor(length)),
        shape=SHAPE,
        position=position,
        fresh=fresh,
        score=old.masked_fill(fresh | (position < 0), 0),
        length=torch.tensor(length),
        mass=mass.masked_fill(position < 0, 0),
        seen=seen.masked_fill(position < 0, 0),
    )


def looked_at(seed: int, before: list[int], length: list[int], window: int) -> LayerView:
    """Heads that hold different stored tokens, and the attention of the last queries."""
    draw = torch.Generator().manual_seed(seed)
    position = ragged(seed, 1, length, before)[0]
    watched = torch.maximum(torch.tensor(before), torch.tensor(length) - window)[:, None, None]
    seen = torch.tensor(length)[:, None, None] - torch.maximum(watched, position + 1)
    old = torch.rand(position.shape, generator=draw, dtype=torch.float64)
    old[torch.rand(position.shape, generator=draw) < 0.1] = torch.inf  # former sinks
    mass = torch.rand(position.shape, generator=draw, dtype=torch.float64) * seen
    return view_of(position, before, length, mass, seen, old)


@given(st.integers(0, 999), st.sampled_from([1, 4, 9, 400]), st.sampled_from([0, 1, 3]))
@quick
def test_a_score_is_the_share_of_queries_that_looked(seed: int, window: int, sinks: int) -> None:
    before, length = [14, 3, 0], [23, 4, 9]
    view = looked_at(seed, before, length, window)
    assert view.mass is not None
    assert view.seen is not None
    found = Scissorhands(window=window, sinks=sinks).score(view)
    for b in range(3):
        for h in range(3):
            for i, p in enumerate(view.position[b, h].tolist()):
                past = min(max(before[b] - 1 - p, 0), window)  # queries behind `score`
                old = view.score[b, h, i].item()
                looked = past * (old if math.isfinite(old) else 0.0) + view.mass[b, h, i].item()
                share = looked / max(past + view.seen[b, h, i].item(), 1)
                expected = math.inf if p < sinks else share
                if p >= 0:
                    assert found[b, h, i].item() == pytest.approx(expected)


def test_while_the_history_is_short_no_query_is_forgotten() -> None:
    looks = torch.rand(20, 20).gt(0.6).double().tril(-1)  # query, token; not to itself
    score = torch.zeros(1, 1, 0, dtype=torch.float64)
    for start, end in pairwise((0, 6, 13, 18, 19, 20)):
        position = torch.arange(end)[None, None]
        seen = end - torch.maximum(torch.tensor(start), position + 1)
        score = torch.cat([score, score.new_zeros(1, 1, end - start)], -1)
        mass = looks[start:end, :end].sum(0)[None, None]
        score = Scissorhands(window=20).score(view_of(position, [start], [end], mass, seen, score))
    for p in range(20):
        later = [looks[q, p].item() for q in range(p + 1, 20)]
        assert score[0, 0, p].item() == pytest.approx(sum(later) / max(len(later), 1))


def test_places_do_not_matter_while_a_token_is_generated() -> None:
    position = torch.tensor([[[7, -1, 20, 0, -1, 12]]])
    old = torch.tensor([[[0.5, 0.0, 0.0, 0.25, 0.0, 0.75]]]).double()
    looks = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 1.0]]]).double()
    seen = torch.tensor([[[1, 0, 0, 1, 0, 1]]])
    score = Scissorhands(window=9).score(view_of(position, [20], [21], looks, seen, old))
    # the past of 7 and 0 counts as 9 queries, that of 12 as its 7
    expected = [5.5 / 10, 0, 0, 2.25 / 10, 0, 6.25 / 8]
    assert score[0, 0].tolist() == pytest.approx(expected)


@given(
    st.integers(0, 999),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, 2, 10]),
    st.integers(1, 12),
)
@quick
def test_sinks_and_the_newest_stay_and_the_best_of_the_others(
    seed: int, sinks: int, recent: int, more: int
) -> None:
    budget, length = sinks + recent + more, [23, 4, 9]
    policy = Scissorhands(Budget(budget), recent=recent, sinks=sinks)
    view = looked_at(seed, [14, 3, 0], length, policy.window)
    score = policy.score(view)
    plan = planned(policy, view, [budget] * 3)
    for b in range(3):
        for h in range(3):
            others = worth(view.position[b, h], score[b, h])
            tokens = len(others)
            sure = [p for p in others if p < sinks or p >= length[b] - recent]
            for p in sure:
                del others[p]
            kept = sorted([*sure, *best(others, budget - len(sure))])
            assert view.position[b, h][plan[b, h] != DROP].tolist() == kept
            assert len(kept) == min(budget, tokens)


@given(st.permutations(range(20)), st.integers(0, 2), st.integers(0, 4), st.integers(1, 4))
@quick
def test_a_full_head_lets_one_token_go_but_no_sink_and_none_of_the_newest(
    scores: list[int], sinks: int, recent: int, more: int
) -> None:
    budget, held = sinks + recent + more, {}
    policy = Scissorhands(Budget(budget), recent=recent, sinks=sinks)
    for at, score in enumerate(scores):
        worth = math.inf if at < sinks else float(score)
        expected = {**held, at: worth}
        if len(expected) > budget:
            old = [p for p in expected if sinks <= p <= at - recent]
            del expected[min(old, key=lambda p: expected[p])]
        assert step(policy, held, at, worth, budget) == sorted(expected)
        held = expected


def test_the_newest_are_as_many_whatever_the_budget() -> None:
    assert Scissorhands(recent=7).recent_tokens(torch.tensor([8, 100])).tolist() == [7, 7]
    assert Scissorhands(recent=0).recent_tokens(torch.tensor([8, 100])) is None


@pytest.mark.parametrize(
    "policy",
    [
        Scissorhands(),
        Scissorhands(Budget(9), window=5, recent=6, sinks=3),
        Scissorhands(Budget(30, "percent"), recent=0),
    ],
    ids=str,
)
def test_the_contract_holds(policy: Scissorhands) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = Scissorhands(Budget(64), window=16, sinks=4)
    assert policy.observe == Observe(last=16, above=1.0, skip=1, generated=True)
    assert (policy.protected, policy.decode, policy.scope) == (14, "step", "layer")
    assert not policy.reads
    assert policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = Scissorhands(Budget(64), window=16, recent=0, sinks=4)
    assert str(policy) == "scissorhands:budget=64,window=16,recent=0,sinks=4"
    assert parse(str(policy)) == policy
    assert parse("scissorhands") == Scissorhands()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=9", "a budget of 9 tokens is smaller than the 10 it protects"),
        ("budget=12,sinks=4", "a budget of 12 tokens is smaller than the 14 it protects"),
        ("window=0", "scissorhands: window=0 is refused"),
        ("recent=-1", "scissorhands: recent=-1 is refused"),
        ("sinks=-1", "scissorhands: sinks=-1 is refused"),
        ("drop=2", "no parameter 'drop'; its parameters: budget, window, recent, sinks"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"scissorhands:{text}")
