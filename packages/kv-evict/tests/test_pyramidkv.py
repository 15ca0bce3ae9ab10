from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import (
    check_counts,
    check_scores_of_snapkv,
    plan_at_random,
    quick,
    ragged,
)
from kv_evict import PyramidKV
from kv_policy import DROP, Budget, Observe, parse
from kv_policy.testing import check_policy


def by_hand(
    policy: PyramidKV, layer: int, layers: int, length: int, budget: int
) -> tuple[int, int]:
    """Return the tokens per head of the layer; two numbers where rounding decides."""
    average = budget - policy.window
    least = average / policy.beta
    most = 2 * average - least
    there = max(length - policy.window, 0)
    if most > there:
        most = max(there, average)
        least = 2 * average - most
    part = average if layers == 1 else most - (most - least) * layer / (layers - 1)
    return floor(part - 1e-9) + policy.window, floor(part + 1e-9) + policy.window


@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 5),
    window=st.integers(1, 6),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    beta=st.sampled_from([1.0, 2.0, 7.5, 20.0]),
)
@quick
def test_heads_keep_what_their_layer_is_given(
    seed: int,
    layers: int,
    window: int,
    more: tuple[int, int],
    lengths: tuple[int, int],
    beta: float,
) -> None:
    policy = PyramidKV(window=window, beta=beta)
    old = [max(length - 5, 0) for length in lengths]
    position, budgets = ragged(seed, layers, lengths, old), [window + m for m in more]
    plan, score = plan_at_random(policy, position, lengths, budgets, seed)
    for b, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        each = [by_hand(policy, n, layers, length, budget) for n in range(layers)]
        counts = [choices for choices in each for _ in range(3)]
        check_counts(plan[:, b], score[:, b], position[:, b], counts)
        assert (plan[:, b] != DROP).sum() <= budget * layers * 3


def test_the_first_layer_keeps_most_and_the_last_a_part_of_the_average() -> None:
    policy, lengths = PyramidKV(window=4, beta=4.0), [300]
    plan, _ = plan_at_random(policy, ragged(0, 4, lengths, [0]), lengths, [44])
    # 40 beside the window: from 70 to 10 by 20
    assert (plan != DROP).sum(-1)[:, 0, 0].tolist() == [74, 54, 34, 14]
    flat, _ = plan_at_random(
        PyramidKV(window=4, beta=1.0), ragged(0, 4, lengths, [0]), lengths, [44]
    )
    assert (flat != DROP).sum(-1).unique().tolist() == [44]


def test_in_a_short_prompt_the_pyramid_is_flatter() -> None:
    policy, lengths = PyramidKV(window=4, beta=4.0), [64]
    plan, _ = plan_at_random(policy, ragged(0, 3, lengths, [0]), lengths, [44])
    # the first layer has only 60 beside its window, so the last keeps 20
    assert (plan != DROP).sum(-1)[:, 0, 0].tolist() == [64, 44, 24]


@pytest.mark.parametrize("tokens", [1, 3, 20, 44])
def test_a_prompt_that_fits_the_budget_is_kept_whole(tokens: int) -> None:
    position = ragged(0, 3, [tokens], [0])
    plan, _ = plan_at_random(PyramidKV(window=4), position, [tokens], [44])
    assert torch.equal(plan != DROP, position >= 0)


def test_scores_are_those_of_snapkv() -> None:
    check_scores_of_snapkv(PyramidKV)


@pytest.mark.parametrize(
    "policy",
    [
        PyramidKV(),
        PyramidKV(Budget(9), window=8, pool=3, beta=1.0),
        PyramidKV(Budget(30, "percent"), window=5, group="max", beta=3.5),
    ],
    ids=str,
)
def test_the_contract_holds(policy: PyramidKV) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = PyramidKV(Budget(64), window=16, group="max")
    assert policy.observe == Observe(last=16, group="max")
    assert (policy.protected, policy.decode, policy.scope) == (16, "grow", "model")
    assert not policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = PyramidKV(Budget(50, "percent"), window=16, pool=7, pooling="max", beta=5.0)
    assert str(policy) == "pyramidkv:budget=50%,window=16,pool=7,pooling=max,beta=5.0"
    assert parse(str(policy)) == policy
    assert parse("pyramidkv") == PyramidKV()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("beta=0.5", "pyramidkv: beta=0.5 is refused"),
        ("pool=4", "pyramidkv: pool=4 has no middle; use an odd number, such as 5"),
        ("floor=0.2", "pyramidkv has no parameter 'floor'; its parameters: budget, window"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"pyramidkv:{text}")
