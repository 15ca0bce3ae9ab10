from dataclasses import replace
from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import (
    LENGTHS,
    attended,
    check_counts,
    check_scores_of_snapkv,
    filled,
    plan_at_random,
    quick,
    ragged,
    shape,
)
from kv_evict import ZigZagKV
from kv_policy import DROP, Budget, Observe, PlanView, parse
from kv_policy.testing import check_policy


def needed(mass: list[float], share: float) -> int:
    """Return how many of the most attended tokens hold the share."""
    total, count = 0.0, 0
    for each in sorted(mass, reverse=True):
        if count and total >= share * sum(mass):
            break
        total, count = total + each, count + 1
    return max(count, 1)  # at least one


@given(st.integers(0, 999), st.sampled_from([1, 4, 8]), st.sampled_from([0.05, 0.5, 0.9, 0.99]))
@quick
def test_a_head_needs_the_fewest_tokens_that_hold_the_share(
    seed: int, window: int, share: float
) -> None:
    view = attended(seed, window)
    assert view.mass is not None
    found = ZigZagKV(window=window, share=share).head_stats(view)
    for b, length in enumerate(LENGTHS):
        for h in range(3):
            positions, mass = view.position[b, h].tolist(), view.mass[b, h].tolist()
            older = [m for p, m in zip(positions, mass, strict=True) if 0 <= p < length - window]
            assert found[b, h].item() == needed(older, share)


def test_one_token_with_all_attention_is_all_a_head_needs() -> None:
    view = attended(0, 4)
    one = torch.zeros_like(view.position, dtype=torch.float64)
    one[..., 0] = 1
    assert ZigZagKV(window=4).head_stats(replace(view, mass=one)).unique().tolist() == [1]
    even = (view.position >= 0).double()
    need = ZigZagKV(window=4, share=0.5).head_stats(replace(view, mass=even))
    older = ((view.position >= 0) & (view.position < view.length[:, None, None] - 4)).sum(-1)
    assert torch.equal(need, (older / 2).ceil())


def by_hand(policy: ZigZagKV, need: list[list[int]], budget: int) -> list[list[float]]:
    """Return the budget of each head of each layer beside the window."""
    average = budget - policy.window
    layer_need = [sum(heads) / len(heads) for heads in need]
    mean = sum(layer_need) / len(layer_need)
    sure = policy.floor * average
    layers = [sure + (average - sure) * each / mean for each in layer_need]
    return [
        [part * head / each for head in heads]
        for part, each, heads in zip(layers, layer_need, need, strict=True)
    ]


@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 4),
    window=st.integers(1, 6),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    sure=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
)
@quick
def test_heads_keep_what_their_layer_and_their_need_give_them(
    seed: int, layers: int, window: int, more: tuple[int, int], sure: float
) -> None:
    policy, budgets = ZigZagKV(window=window, floor=sure), [window + m for m in more]
    draw = torch.Generator().manual_seed(seed)
    need = torch.randint(1, 25, (layers, 2, 3), generator=draw)
    position = ragged(seed, layers)
    plan, score = plan_at_random(policy, position, LENGTHS, budgets, seed, need.float())
    for b, budget in enumerate(budgets):
        asked = [part for heads in by_hand(policy, need[:, b].tolist(), budget) for part in heads]
        parts = filled(asked, LENGTHS[b] - window)
        counts = [{floor(part + hair) + window for hair in (-1e-5, 1e-5)} for part in parts]
        check_counts(plan[:, b], score[:, b], position[:, b], counts)
        assert (plan[:, b] != DROP).sum() <= budget * layers * 3


def test_a_budget_worked_out_by_hand() -> None:
    need = torch.tensor([[[2.0, 4, 6], [1, 1, 1]], [[12, 12, 12], [1, 1, 1]]])
    policy = ZigZagKV(window=2, floor=0.5)
    counts = policy.counts(
        PlanView(
            shape=shape(2),
            first_layer=0,
            score=torch.zeros(2, 2, 3, 1),
            position=torch.zeros(2, 2, 3, 1, dtype=torch.long),
            tier=torch.zeros(2, 2, 3, 1, dtype=torch.uint8),
            length=torch.tensor([100, 100]),
            budget=torch.tensor([18, 18]),
            head_stats=need,
        )
    )
    # layers need 4 and 12, 8 on average; of 16 each, 8 are reserved and 8 follow need: 12 and 20
    assert (counts - 2)[:, 0].tolist() == [[6, 12, 18], [20, 20, 20]]
    assert (counts - 2)[:, 1].tolist() == [[16, 16, 16]] * 2


def test_scores_are_those_of_snapkv() -> None:
    check_scores_of_snapkv(ZigZagKV)


@pytest.mark.parametrize(
    "policy",
    [
        ZigZagKV(),
        ZigZagKV(Budget(9), window=8, pool=3, share=0.5, floor=0.0),
        ZigZagKV(Budget(30, "percent"), window=5, group="max", floor=1.0),
    ],
    ids=str,
)
def test_the_contract_holds(policy: ZigZagKV) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = ZigZagKV(Budget(64), window=16, group="max")
    assert policy.observe == Observe(last=16, group="max")
    assert (policy.protected, policy.decode, policy.scope) == (16, "grow", "model")
    assert not policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = ZigZagKV(Budget(50, "percent"), window=16, share=0.8, floor=0.25)
    assert str(policy) == "zigzagkv:budget=50%,window=16,share=0.8,floor=0.25"
    assert parse(str(policy)) == policy
    assert parse("zigzagkv") == ZigZagKV()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("share=0", "zigzagkv: share=0 is refused"),
        ("share=1", "zigzagkv: share=1 is refused"),
        ("floor=1.5", "zigzagkv: floor=1.5 is refused"),
        ("pool=4", "zigzagkv: pool=4 has no middle; use an odd number, such as 5"),
        ("beta=2", "zigzagkv has no parameter 'beta'; its parameters: budget, window"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"zigzagkv:{text}")
