import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import keyed, planned, quick
from kv_evict import KeyDiff
from kv_policy import DROP, Budget, CacheShape, LayerView, Observe, parse
from kv_policy.testing import check_policy


def ragged(seed: int) -> LayerView:
    """Heads that hold different stored tokens, and keys of different norms."""
    view, draw = keyed(seed), torch.Generator().manual_seed(seed + 1000)
    length = torch.rand(*view.position.shape, 1, generator=draw, dtype=torch.float64) * 9 + 0.1
    return replace(view, keys=view.keys * length)


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def by_hand(keys: Tensor) -> list[float]:
    """Return minus the cosine between each key and the mean direction, by definition."""
    rows: list[list[float]] = keys.tolist()
    units = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in rows]
    mean = [sum(column) / len(units) for column in zip(*units, strict=True)]
    return [-cosine(row, mean) for row in rows]


@given(st.integers(0, 999))
@quick
def test_a_score_is_minus_the_cosine_to_the_mean_direction_of_the_heads_keys(seed: int) -> None:
    view = ragged(seed)
    assert view.keys is not None
    found = KeyDiff().score(view)
    for b in range(2):
        for h in range(3):
            there = view.position[b, h] >= 0
            expected = by_hand(view.keys[b, h][there])
            assert found[b, h][there].tolist() == pytest.approx(expected)


@given(st.integers(0, 999))
@quick
def test_how_long_a_key_is_does_not_matter(seed: int) -> None:
    view = ragged(seed)
    assert view.keys is not None
    stretch = torch.arange(1, view.keys.shape[2] + 1, dtype=torch.float64)[:, None]
    longer = KeyDiff().score(replace(view, keys=view.keys * stretch))
    assert longer.flatten().tolist() == pytest.approx(KeyDiff().score(view).flatten().tolist())


@given(st.integers(0, 999), st.tuples(st.integers(1, 30), st.integers(1, 12)))
@quick
def test_each_head_keeps_the_keys_that_differ_most(seed: int, budget: tuple[int, int]) -> None:
    policy, view = KeyDiff(), ragged(seed)
    plan = planned(policy, view, budget)
    assert view.keys is not None
    for b in range(2):
        for h in range(3):
            there = view.position[b, h] >= 0
            differs = by_hand(view.keys[b, h][there])
            positions = view.position[b, h][there].tolist()
            order = sorted(range(len(positions)), key=lambda i: -differs[i])
            kept = sorted(positions[i] for i in order[: budget[b]])
            assert view.position[b, h][plan[b, h] != DROP].tolist() == kept


def test_the_one_key_that_points_elsewhere_is_worth_most() -> None:
    keys = torch.tensor([[1.0, 0.1], [5.0, 0.0], [-0.1, 0.0], [2.0, -0.1]])
    view = LayerView(
        layer=torch.tensor([0]),
        shape=CacheShape(layers=1, kv_heads=1, group=1, key_dim=2, value_dim=2),
        position=torch.tensor([[[0, 1, 2, 3]]]),
        fresh=torch.ones(1, 1, 4, dtype=torch.bool),
        score=torch.zeros(1, 1, 4),
        length=torch.tensor([4]),
        keys=keys[None, None],
    )
    score = KeyDiff().score(view).flatten()
    assert score.argmax() == 2
    assert score[2].item() == pytest.approx(1, abs=1e-3)
    assert (score[[0, 1, 3]] < -0.9).all()


@pytest.mark.parametrize(
    "policy", [KeyDiff(), KeyDiff(Budget(3)), KeyDiff(Budget(30, "percent"))], ids=str
)
def test_the_contract_holds(policy: KeyDiff) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = KeyDiff(Budget(64))
    assert policy.reads == {"keys"}
    assert policy.observe == Observe()
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (0, "grow", "layer", 1)
    assert policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = KeyDiff(Budget(50, "percent"))
    assert str(policy) == "keydiff:budget=50%"
    assert parse(str(policy)) == policy
    assert parse("keydiff") == KeyDiff()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keydiff:budget=0", "budget=0 is refused"),
        ("keydiff:budget=1.5", "tokens are whole"),
        ("keydiff:sinks=4", "keydiff has no parameter 'sinks'; its parameters: budget"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
