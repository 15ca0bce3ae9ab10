import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import LENGTHS, SHAPE, keyed, plan_view, quick
from kv_evict import RKV, r_kv
from kv_policy import DROP, Budget, LayerView, Observe, Replan, RunningMean, complete, parse
from kv_policy.testing import check_policy


def similarity(a: list[float], b: list[float]) -> float:
    sizes = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / sizes


def redundancy(keys: list[list[float]], similar: float) -> list[float]:
    """By definition, for the keys of a head in the order of their positions."""
    total = [0.0] * len(keys)
    for i, key in enumerate(keys):
        row = [0.0 if i == j else similarity(key, other) for j, other in enumerate(keys)]
        alike = [j for j, cosine in enumerate(row) if cosine > similar]
        if alike:
            row[alike[-1]] = 0.0
        total = [a + b for a, b in zip(total, row, strict=True)]
    powers = [math.exp(x / len(keys)) for x in total]
    return [x / sum(powers) for x in powers]


def importance(scores: dict[int, float], length: int, window: int, pool: int) -> list[float]:
    """The greatest score of the neighbours, outside the window."""
    older = {p: s for p, s in scores.items() if p < length - window}
    return [
        max(s for q, s in older.items() if abs(p - q) <= pool // 2) if p in older else 0.0
        for p in scores
    ]


def check_by_loops(policy: RKV, view: LayerView) -> None:
    found = policy.rescore(view)
    assert view.keys is not None
    for b, length in enumerate(view.length.tolist()):
        for h in range(view.position.shape[1]):
            there = view.position[b, h] >= 0
            places, scores = view.position[b, h][there].tolist(), view.score[b, h][there].tolist()
            scored = dict(zip(places, scores, strict=True))
            important = importance(scored, length, policy.window, policy.pool)
            redundant = redundancy(view.keys[b, h][there].tolist(), policy.similar)
            right = [
                policy.weight * i - (1 - policy.weight) * r
                for i, r in zip(important, redundant, strict=True)
            ]
            assert found[b, h][there].tolist() == pytest.approx(right, rel=1e-9, abs=1e-12)


@given(
    st.integers(0, 999),
    st.integers(1, 13),
    st.sampled_from([1, 3, 7, 99]),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]),
)
@quick
def test_a_plan_goes_by_the_formula(
    seed: int, window: int, pool: int, weight: float, similar: float
) -> None:
    policy = RKV(window=window, pool=pool, weight=weight, similar=similar)
    check_by_loops(policy, keyed(seed))


@pytest.mark.parametrize("together", [1, 100, 500])
def test_blocks_of_keys_give_the_same(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    view, policy = keyed(5), RKV(window=3)
    whole = policy.rescore(view)
    monkeypatch.setattr(r_kv, "_TOGETHER", together)
    torch.testing.assert_close(policy.rescore(view), whole, rtol=1e-12, atol=0)
    check_by_loops(policy, view)


def head(keys: torch.Tensor, score: torch.Tensor | None = None) -> LayerView:
    """One head with these keys, at positions from 0 on."""
    position = torch.arange(len(keys))[None, None]
    return LayerView(
        layer=torch.tensor([0]),
        shape=replace(SHAPE, kv_heads=1),
        position=position,
        fresh=torch.zeros_like(position, dtype=torch.bool),
        score=torch.zeros(1, 1, len(keys)).double() if score is None else score[None, None],
        length=torch.tensor([len(keys)]),
        keys=keys[None, None],
    )


def kept(policy: RKV, view: LayerView) -> list[int]:
    """The tokens of one head that a plan keeps."""
    position, lengths = view.position[None], view.length.tolist()
    given = plan_view(policy.rescore(view)[None], position, lengths, [int(policy.budget.amount)])
    return position[policy.plan(given) != DROP].tolist()


def test_one_token_alone() -> None:
    policy = RKV(Budget(8))
    view = head(torch.ones(1, 5).double())
    assert policy.rescore(view).tolist() == [[[-0.9]]]  # the softmax of a single number is 1
    assert kept(policy, view) == [0]


def test_only_the_newest_of_repeated_tokens_stays() -> None:
    # Three meanings that differ, each said four times with little noise, then the window.
    draw = torch.Generator().manual_seed(2)
    noise = torch.randn(14, 14, generator=draw).double() / 50
    keys = torch.eye(14).double()[[*[0, 1, 2] * 4, 3, 4]] + noise
    for weight in (0.0, 0.1):
        policy = RKV(Budget(5), window=2, weight=weight)
        assert kept(policy, head(keys)) == [9, 10, 11, 12, 13]
    every = RKV(Budget(5), window=2, weight=0.0, similar=1.0)  # none counts as similar
    assert kept(every, head(keys)) != [9, 10, 11, 12, 13]


def test_attention_keeps_a_repeated_token_with_enough_weight() -> None:
    keys = torch.eye(8).double()[[0, 0, 0, 0, 1, 2, 3, 4]]
    attended = torch.tensor([0, 0.9, 0, 0, 0, 0, 0, 0]).double()
    few = {"window": 2, "pool": 1}
    assert 1 not in kept(RKV(Budget(5), weight=0.0, **few), head(keys, attended))
    assert 1 in kept(RKV(Budget(5), weight=0.5, **few), head(keys, attended))
    assert kept(RKV(Budget(3), weight=1.0, **few), head(keys, attended)) == [1, 6, 7]


def test_empty_slots_give_nothing() -> None:
    view, policy = keyed(3), RKV(window=3)
    assert view.keys is not None
    garbage = replace(view, score=view.score.masked_fill(view.position < 0, torch.nan))
    there = view.position >= 0
    assert torch.equal(policy.rescore(garbage)[there], policy.rescore(view)[there])
    nothing = replace(view, position=torch.full_like(view.position, -1), keys=view.keys * 0)
    assert not policy.rescore(nothing).isnan().any()


def seen_by(view: LayerView, queries: int, window: int, **more: object) -> LayerView:
    """The view after a pass of so many queries of each sequence, with their attention."""
    first = view.length[:, None, None] - min(queries, window)
    seen = view.length[:, None, None] - torch.maximum(first, view.position + 1)
    seen = seen.clamp(min=0).masked_fill(view.position < 0, 0)
    draw = torch.Generator().manual_seed(1)
    mass = torch.rand(view.position.shape, generator=draw, dtype=torch.float64) * seen
    return replace(view, mass=mass, seen=seen, **more)


@pytest.mark.parametrize("queries", [1, 3, 8, 20])
def test_what_is_stored_is_the_mean_attention_of_the_last_queries(queries: int) -> None:
    policy, view = RKV(window=8), keyed(4)
    fresh = view.position >= view.length[:, None, None] - queries
    score = view.score.masked_fill(fresh | (view.position % 5 == 0), 0)
    view = seen_by(view, queries, 8, fresh=fresh, score=score)
    found = policy.score(view)
    for b in range(len(LENGTHS)):
        for h in range(SHAPE.kv_heads):
            for i, place in enumerate(view.position[b, h].tolist()):
                if place < 0:
                    continue
                old, mass = float(score[b, h, i]), float(view.mass[b, h, i])
                count = int(view.seen[b, h, i])
                new = mass / max(1, count)
                part = 1 if old == 0 else count / 8
                assert float(found[b, h, i]) == pytest.approx(part * new + (1 - part) * old)


@pytest.mark.parametrize(("window", "past"), [(8, 4), (1, 1), (5, 2)])
def test_generated_queries_move_the_average(window: int, past: int) -> None:
    policy, view = RKV(window=window), keyed(6)
    fresh = view.position == view.length[:, None, None] - 1
    score = view.score.masked_fill(fresh, 0)
    view = seen_by(view, 1, window, fresh=fresh, score=score, generated=True)
    found = policy.score(view)
    before = view.length[:, None, None] - 1
    weight = (before - 1 - view.position).clamp(min=0, max=past)
    right = (score * weight + view.mass) / (weight + view.seen).clamp(min=1)
    there = view.position >= 0
    torch.testing.assert_close(found[there], right[there])
    assert policy.running == RunningMean(past)


def test_a_generated_token_that_nothing_was_observed_for_scores_0() -> None:
    view = replace(keyed(0), score=torch.zeros_like(keyed(0).score), generated=True)
    assert not RKV(every=0).score(view).any()


@pytest.mark.parametrize(
    "text",
    [
        "r-kv",
        "r-kv:budget=8",
        "r-kv:budget=16,window=4,pool=3,every=0",
        "r-kv:keep=25%,weight=0,similar=0,every=5",
        "r-kv:budget=40,weight=1,window=1,pool=1,short=true,most=99",
        "r-kv:budget=30,uncompressed=9,similar=1,every=0",
        "r-kv:budget=30+leankv",
        "r-kv:budget=30,every=0+leankv:window=4",
    ],
)
def test_the_contract_holds(text: str) -> None:
    if "leankv" in text:
        pytest.importorskip("kv_quant")
    policy = parse(text)
    check_policy(policy)
    assert parse(str(policy)) == policy


def test_what_it_says_of_itself() -> None:
    policy = complete(RKV(Budget(64)))
    assert policy.observe == Observe(last=8, group="max", skip=1, generated=True)
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (8, "grow", "layer", 1)
    assert policy.reads == {"keys"}
    assert policy.replan == Replan(every=128)
    assert policy.rescore is not None
    once = complete(RKV(every=0))
    assert (once.observe.generated, once.running, once.replan) == (False, None, Replan())
    assert complete(RKV(every=0, uncompressed=5, most=7)).replan == Replan(0, 5, False, 7)
    assert RKV().capabilities.splits_heads
    assert not RKV().capabilities.shares_prefixes
    assert "2505.24133" in RKV.source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r-kv:budget=7", "a budget of 7 tokens is smaller than the 8 it protects"),
        ("r-kv:pool=4", "r-kv: pool=4 has no middle; use an odd number, such as 5"),
        ("r-kv:window=0", "r-kv: window=0 is refused"),
        ("r-kv:weight=1.5", "r-kv: weight=1.5 is refused"),
        ("r-kv:similar=-0.5", "r-kv: similar=-0.5 is refused"),
        ("r-kv:every=-1", "r-kv: every=-1 is refused"),
        ("r-kv:most=0", "r-kv: most=0 is refused"),
        ("r-kv+snapkv", "both define which tokens are kept"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
