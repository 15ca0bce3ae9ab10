from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import (
    LENGTHS,
    check_scores_of_snapkv,
    plan_view,
    quick,
    ragged,
    random_scores,
    worth,
)
from kv_evict import AdaPyramidKV, AdaSnapKV, SnapKV
from kv_policy import DROP, Budget, Observe, parse
from kv_policy.testing import check_policy


def uneven(seed: int, position: Tensor, window: int) -> Tensor:
    """Scores that are high in some heads and low in others; infinite in the window."""
    draw = torch.Generator().manual_seed(seed + 1000)
    level = torch.rand(*position.shape[:3], 1, generator=draw).clamp(min=1e-6)
    return random_scores(seed, position, LENGTHS, window) * level


def share_out(
    scores: list[dict[int, float]], average: int, sure: float, length: int, window: int
) -> list[list[list[int]]]:
    """Return what each head keeps beside its window; two numbers where rounding decides."""
    old = [{p: s for p, s in head.items() if p < length - window} for head in scores]
    best = sorted((-s, h) for h, head in enumerate(old) for s in head.values())
    best = best[: average * len(scores)]
    result = []
    for h, head in enumerate(old):
        found = sum(owner == h for _, owner in best)
        order = sorted(head, key=lambda p: -head[p])
        part = found * (1 - sure) + average * sure
        result.append([sorted(order[: floor(part + hair)]) for hair in (-1e-9, 1e-9)])
    return result


def check_plan(
    plan: Tensor, score: Tensor, position: Tensor, window: int, sure: float, averages: list[int]
) -> None:
    """Compare one sequence's plan; `averages` has the average per head of each layer."""
    length = int(position.max()) + 1
    for n, average in enumerate(averages):
        scores = []
        for h in range(3):
            scores.append(worth(position[n, h], score[n, h]))
        for h, choices in enumerate(share_out(scores, average, sure, length, window)):
            own = [p for p in sorted(scores[h]) if p >= length - window]
            kept = position[n, h][plan[n, h] != DROP].tolist()
            assert kept in [choice + own for choice in choices]
        assert (plan[n] != DROP).sum() <= (average + window) * 3


@given(
    seed=st.integers(0, 999),
    window=st.integers(1, 6),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    sure=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
@quick
def test_heads_of_a_layer_share_its_best_tokens(
    seed: int, window: int, more: tuple[int, int], sure: float
) -> None:
    position = ragged(seed, 2)
    score = uneven(seed, position, window)
    policy = AdaSnapKV(window=window, floor=sure)
    plan = policy.plan(plan_view(score, position, LENGTHS, [window + m for m in more]))
    for b in range(2):
        check_plan(plan[:, b], score[:, b], position[:, b], window, sure, [more[b]] * 2)


@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 4),
    window=st.integers(1, 6),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    sure=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
@quick
def test_in_a_pyramid_too(
    seed: int, layers: int, window: int, more: tuple[int, int], sure: float
) -> None:
    position = ragged(seed, layers)
    score = uneven(seed, position, window)
    policy = AdaPyramidKV(window=window, floor=sure, beta=4.0)
    plan = policy.plan(plan_view(score, position, LENGTHS, [window + m for m in more]))
    for b, length in enumerate(LENGTHS):
        most = min(2 * more[b] - more[b] / 4, max(length - window, more[b]))
        fall = 2 * (most - more[b]) / max(layers - 1, 1)  # from one layer to the next; exact
        averages = [floor(most - fall * n + 1e-9) for n in range(layers)]
        if layers == 1:
            averages = [more[b]]
        check_plan(plan[:, b], score[:, b], position[:, b], window, sure, averages)
        assert (plan[:, b] != DROP).sum() <= (more[b] + window) * layers * 3


def test_a_head_that_looks_at_one_thing_gives_up_all_but_the_floor() -> None:
    position = torch.arange(30).expand(1, 1, 2, 30)
    score = torch.rand(1, 1, 2, 30, generator=torch.Generator().manual_seed(0)) + 1
    score[:, :, 1] /= 100
    score[..., 26:] = torch.inf
    # 4 in the window, and 10 on average beside it
    for sure, counts in ((0.0, [24, 4]), (0.2, [22, 6]), (0.5, [19, 9]), (1.0, [14, 14])):
        policy = AdaSnapKV(window=4, floor=sure)
        plan = policy.plan(plan_view(score, position, [30], [14]))
        assert (plan != DROP).sum(-1).flatten().tolist() == counts


def test_an_even_floor_is_snapkv() -> None:
    position = ragged(5, 2)
    score = uneven(5, position, 4)
    view = plan_view(score, position, LENGTHS, [12, 7])
    assert torch.equal(AdaSnapKV(window=4, floor=1.0).plan(view), SnapKV(window=4).plan(view))


@pytest.mark.parametrize("policy", [AdaSnapKV, AdaPyramidKV])
def test_scores_are_those_of_snapkv(policy: type[AdaSnapKV] | type[AdaPyramidKV]) -> None:
    check_scores_of_snapkv(policy)


@pytest.mark.parametrize(
    "policy",
    [
        AdaSnapKV(),
        AdaSnapKV(Budget(9), window=8, pool=3, floor=0.0),
        AdaSnapKV(Budget(30, "percent"), window=5, floor=1.0),
        AdaPyramidKV(),
        AdaPyramidKV(Budget(9), window=8, pool=3, floor=0.0, beta=1.0),
        AdaPyramidKV(Budget(30, "percent"), window=5, floor=0.7),
    ],
    ids=str,
)
def test_the_contract_holds(policy: AdaSnapKV | AdaPyramidKV) -> None:
    check_policy(policy)


def test_what_they_say_of_themselves() -> None:
    snap, pyramid = AdaSnapKV(Budget(64), window=16), AdaPyramidKV(Budget(64), window=16)
    assert (snap.scope, pyramid.scope) == ("layer", "model")
    for policy in (snap, pyramid):
        assert policy.observe == Observe(last=16)
        assert (policy.protected, policy.decode) == (16, "grow")
        assert not policy.capabilities.splits_heads
        assert policy.capabilities.shortens


def test_text_form() -> None:
    snap = AdaSnapKV(Budget(50, "percent"), window=16, floor=0.5)
    assert str(snap) == "ada-snapkv:budget=50%,window=16,floor=0.5"
    assert parse(str(snap)) == snap
    pyramid = AdaPyramidKV(Budget(64), beta=5.0, floor=0.5)
    assert str(pyramid) == "ada-pyramidkv:budget=64,beta=5.0,floor=0.5"
    assert parse(str(pyramid)) == pyramid
    assert (parse("ada-snapkv"), parse("ada-pyramidkv")) == (AdaSnapKV(), AdaPyramidKV())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ada-snapkv:budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("ada-pyramidkv:budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("ada-snapkv:floor=1.5", "ada-snapkv: floor=1.5 is refused"),
        ("ada-pyramidkv:floor=-0.1", "ada-pyramidkv: floor=-0.1 is refused"),
        ("ada-pyramidkv:beta=0", "ada-pyramidkv: beta=0 is refused"),
        ("ada-snapkv:beta=2", "ada-snapkv has no parameter 'beta'; its parameters: budget"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
