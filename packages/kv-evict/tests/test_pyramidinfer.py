from math import cos, floor, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import (
    check_counts,
    check_scores_of_snapkv,
    filled,
    plan_at_random,
    quick,
    ragged,
)
from kv_evict import PyramidInfer
from kv_policy import DROP, Budget, Observe, parse
from kv_policy.testing import check_policy


def by_hand(policy: PyramidInfer, layers: int, budget: int, length: int) -> list[tuple[int, int]]:
    """Return the tokens per head of each layer; two numbers where rounding decides."""
    last = policy.last_layer
    falls = [cos(pi * n / (layers - 1)) if layers > 1 else 1.0 for n in range(layers)]
    weights = [last + (1 - last) * (1 + fall) / 2 for fall in falls]
    asked = [(budget - policy.window) * weight * layers / sum(weights) for weight in weights]
    parts = filled(asked, max(length - policy.window, 0))
    return [tuple(floor(part + hair) + policy.window for hair in (-1e-5, 1e-5)) for part in parts]


@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 5),
    window=st.integers(1, 6),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    last=st.sampled_from([0.01, 0.2, 0.5, 1.0]),
)
@quick
def test_heads_keep_what_their_layer_is_given(
    seed: int,
    layers: int,
    window: int,
    more: tuple[int, int],
    lengths: tuple[int, int],
    last: float,
) -> None:
    policy = PyramidInfer(window=window, last_layer=last)
    old = [max(length - 5, 0) for length in lengths]
    position, budgets = ragged(seed, layers, lengths, old), [window + m for m in more]
    plan, score = plan_at_random(policy, position, lengths, budgets, seed)
    for b, budget in enumerate(budgets):
        each = by_hand(policy, layers, budget, lengths[b])
        counts = [choices for choices in each for _ in range(3)]
        check_counts(plan[:, b], score[:, b], position[:, b], counts)
        assert (plan[:, b] != DROP).sum() <= budget * layers * 3


def test_budgets_fall_slowly_at_both_ends_to_a_part_of_the_first() -> None:
    policy, lengths = PyramidInfer(window=4, last_layer=0.2), [300]
    plan, _ = plan_at_random(policy, ragged(0, 4, lengths, [0]), lengths, [62])
    # 58 beside the window, on average, by 1, 0.8, 0.4 and 0.2
    assert (plan != DROP).sum(-1)[:, 0, 0].tolist() == [100, 81, 42, 23]


def test_a_last_layer_like_the_first_makes_all_alike() -> None:
    policy, lengths = PyramidInfer(window=4, last_layer=1.0), [300]
    plan, _ = plan_at_random(policy, ragged(0, 4, lengths, [0]), lengths, [64])
    assert (plan != DROP).sum(-1).unique().tolist() == [64]


def test_scores_are_those_of_snapkv() -> None:
    check_scores_of_snapkv(PyramidInfer)


@pytest.mark.parametrize(
    "policy",
    [
        PyramidInfer(),
        PyramidInfer(Budget(9), window=8, pool=3, last_layer=1.0),
        PyramidInfer(Budget(30, "percent"), window=5, group="max", last_layer=0.01),
    ],
    ids=str,
)
def test_the_contract_holds(policy: PyramidInfer) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = PyramidInfer(Budget(64), window=16, group="max")
    assert policy.observe == Observe(last=16, group="max")
    assert (policy.protected, policy.decode, policy.scope) == (16, "grow", "model")
    assert not policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = PyramidInfer(Budget(50, "percent"), window=16, pool=7, pooling="max", last_layer=0.5)
    assert str(policy) == "pyramidinfer:budget=50%,window=16,pool=7,pooling=max,last_layer=0.5"
    assert parse(str(policy)) == policy
    assert parse("pyramidinfer") == PyramidInfer()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("last_layer=0", "pyramidinfer: last_layer=0 is refused"),
        ("last_layer=1.5", "pyramidinfer: last_layer=1.5 is refused"),
        ("pool=4", "pyramidinfer: pool=4 has no middle; use an odd number, such as 5"),
        ("floor=0.2", "pyramidinfer has no parameter 'floor'; its parameters: budget, window"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"pyramidinfer:{text}")
