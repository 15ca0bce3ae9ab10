import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import (
    LENGTHS,
    SHAPE,
    STORED,
    check_counts,
    filled,
    plan_at_random,
    plan_view,
    quick,
    ragged,
)
from kv_evict import CAKE
from kv_policy import DROP, Budget, CacheShape, LayerView, Observe, parse
from kv_policy.testing import check_policy

WINDOW = 4


def watched(seed: int, group: int) -> tuple[LayerView, Tensor]:
    """Return the observation of the window's attention, and that attention [B H G q L]."""
    draw, position = torch.Generator().manual_seed(seed), ragged(seed)[0]
    query = (torch.tensor(LENGTHS)[:, None] - WINDOW + torch.arange(WINDOW))[:, None, None, :, None]
    sees = (position >= 0)[:, :, None, None] & (position[:, :, None, None] <= query)
    places = (2, 3, group, WINDOW, position.shape[-1])
    logits = torch.randn(places, generator=draw, dtype=torch.float64) * 2
    p = logits.masked_fill(~sees, -torch.inf).softmax(-1)
    view = LayerView(
        layer=torch.zeros_like(torch.tensor(LENGTHS)),
        shape=replace(SHAPE, group=group),
        position=position,
        fresh=position >= torch.tensor(STORED)[:, None, None],
        score=torch.zeros(position.shape, dtype=torch.float64),
        length=torch.tensor(LENGTHS),
        mass=p.mean(2).sum(2),
        seen=sees[:, :, 0].sum(2),
        also={
            "squares": p.square().mean(2).sum(2),
            "entropy": torch.special.entr(p).mean(2).sum(2),
        },
    )
    return view, p


def variance(rows: list[list[float]]) -> float:
    """Return the unbiased variance over all queries of all query heads, one row each."""
    every = [x for row in rows for x in row]
    mean = sum(every) / len(every)
    return sum((x - mean) ** 2 for x in every) / max(len(every) - 1, 1)


@given(st.integers(0, 999), st.sampled_from([1, 3]), st.sampled_from([0.0, 5.0, 200.0]))
@quick
def test_a_score_is_the_mean_and_the_weighted_variance_pooled(
    seed: int, pool: int, gamma: float
) -> None:
    view, p = watched(seed, group=2)
    found = CAKE(window=WINDOW, pool=pool, gamma=gamma).score(view)
    for b, length in enumerate(LENGTHS):
        for h in range(3):
            worth = {}
            for i, at in enumerate(view.position[b, h].tolist()):
                if 0 <= at < length - WINDOW:
                    rows = p[b, h, :, :, i].tolist()
                    mean = sum(map(sum, rows)) / (2 * WINDOW)
                    worth[at] = mean + gamma * variance(rows)
            for i, at in enumerate(view.position[b, h].tolist()):
                if at in worth:
                    near = [s for q, s in worth.items() if abs(at - q) <= pool // 2]
                    assert found[b, h, i].item() == pytest.approx(sum(near) / len(near))
                elif at >= 0:
                    assert found[b, h, i].item() == math.inf


@given(
    st.integers(0, 999),
    st.sampled_from([1, 2]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.5, 1.0, 3.0]),
)
@quick
def test_a_layer_is_preferred_by_its_entropy_and_variance(
    seed: int, group: int, tau1: float, tau2: float
) -> None:
    view, p = watched(seed, group)
    found = CAKE(window=WINDOW, tau1=tau1, tau2=tau2).head_stats(view)
    assert view.seen is not None
    for b in range(2):
        entropy = restless = 0.0
        for h in range(3):
            for i, seen in enumerate(view.seen[b, h].tolist()):
                if view.position[b, h, i] >= LENGTHS[b] - WINDOW:
                    continue  # the window's own tokens are left out
                rows = p[b, h, :, WINDOW - seen :, i].tolist()  # by the queries that come after it
                entropy -= sum(x * math.log(x) for row in rows for x in row) / group
                restless += variance(rows) if seen else 0
        expected = entropy ** (1 / tau1) * restless ** (1 / tau2)
        assert found[b].tolist() == pytest.approx([expected] * 3)


def test_only_means_of_a_group_have_a_variance() -> None:
    with pytest.raises(ValueError, match="group=max, but variances need group=mean"):
        CAKE(group="max")


def test_layers_without_a_preference_share_evenly() -> None:
    position = torch.arange(40).expand(2, 2, 3, 40)
    score, even = torch.rand(position.shape), torch.zeros(2, 2, 3)
    view = plan_view(score, position, LENGTHS, [WINDOW + 12] * 2, even)
    found = CAKE(window=WINDOW).counts(view) - WINDOW
    assert found[:, 0].unique().tolist() == [12]
    assert found[:, 1].unique().tolist() == [7]  # the whole sequence


def test_attention_that_changes_is_worth_more_than_attention_that_stays() -> None:
    position = torch.arange(8)[None, None]
    view = LayerView(
        layer=torch.tensor([0]),
        shape=CacheShape(layers=1, kv_heads=1, group=1, key_dim=4, value_dim=4),
        position=position,
        fresh=torch.ones_like(position, dtype=torch.bool),
        score=torch.zeros(1, 1, 8),
        length=torch.tensor([8]),
        mass=torch.tensor([[[0.4, 0.4, 0, 0, 0, 0, 0, 0]]]),
        seen=(8 - position).clamp(max=2),
        # twice 0.2; and 0.4 once
        also={
            "squares": torch.tensor([[[0.08, 0.16, 0, 0, 0, 0, 0, 0]]]),
            "entropy": torch.zeros(1, 1, 8),
        },
    )
    steady, changing = CAKE(window=2, pool=1, gamma=10.0).score(view)[0, 0, :2].tolist()
    assert (steady, changing) == (pytest.approx(0.2, abs=1e-6), pytest.approx(0.2 + 10 * 0.08))
    plain = CAKE(window=2, pool=1, gamma=0.0).score(view)[0, 0, :2].tolist()
    assert plain == pytest.approx([0.2, 0.2])


@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 4),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
@quick
def test_layers_share_the_budget_by_preference(
    seed: int, layers: int, more: tuple[int, int]
) -> None:
    policy, position = CAKE(window=WINDOW), ragged(seed, layers)
    draw = torch.Generator().manual_seed(seed)
    head_stats = torch.rand(layers, 2, 1, generator=draw).expand(-1, -1, 3) * 1e-4 + 1e-6
    budgets = [WINDOW + m for m in more]
    plan, score = plan_at_random(policy, position, LENGTHS, budgets, seed, head_stats)
    for b in range(2):
        preference = head_stats[:, b, 0].tolist()
        asked = [more[b] * layers * p / sum(preference) for p in preference for _ in range(3)]
        parts = filled(asked, LENGTHS[b] - WINDOW)
        counts = [{math.floor(part + hair) + WINDOW for hair in (-1e-5, 1e-5)} for part in parts]
        check_counts(plan[:, b], score[:, b], position[:, b], counts)
        assert (plan[:, b] != DROP).sum() <= (more[b] + WINDOW) * layers * 3


def test_a_preference_three_times_as_great_brings_three_times_as_much() -> None:
    position = torch.arange(30).expand(2, 2, 3, 30)
    head_stats = torch.tensor([[0.5, 0.25], [1.5, 0.25]])[..., None].expand(-1, -1, 3)
    view = plan_view(torch.rand(position.shape), position, LENGTHS, [20, 20], head_stats)
    counts = CAKE(window=WINDOW).counts(view)[..., 0]
    assert (counts - WINDOW).tolist() == [[8, 7], [24, 7]]  # the whole second sequence
    # the scale of the preferences does not matter
    tiny = replace(view, head_stats=view.head_stats * 2.0**-100)
    assert torch.equal(CAKE(window=WINDOW).counts(tiny)[..., 0], counts)


@pytest.mark.parametrize(
    "policy",
    [
        CAKE(),
        CAKE(Budget(9), window=8, pool=3, gamma=0.0, tau1=0.5, tau2=2.0),
        CAKE(Budget(30, "percent"), window=5, pooling="max"),
    ],
    ids=str,
)
def test_the_contract_holds(policy: CAKE) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = CAKE(Budget(64), window=16)
    both = frozenset({"entropy", "squares"})
    assert policy.observe == Observe(last=16, also=both)
    assert (policy.protected, policy.decode, policy.scope) == (16, "grow", "model")
    assert not policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = CAKE(Budget(50, "percent"), window=16, gamma=5.0, tau1=1.5, tau2=0.5)
    assert str(policy) == "cake:budget=50%,window=16,gamma=5.0,tau1=1.5,tau2=0.5"
    assert parse(str(policy)) == policy
    assert parse("cake") == CAKE()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("gamma=-1", "cake: gamma=-1 is refused"),
        ("tau1=0", "cake: tau1=0 is refused"),
        ("tau2=-2", "cake: tau2=-2 is refused"),
        ("pool=4", "cake: pool=4 has no middle; use an odd number, such as 5"),
        ("tau=1", "cake has no parameter 'tau'; its parameters: budget, window"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"cake:{text}")
