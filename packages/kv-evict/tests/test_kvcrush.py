"""KVCrush: a part of the budget is for tokens that stand for others."""

from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import best, check_scores_of_snapkv, plan_at_random, quick, ragged, worth
from kv_evict import KVCrush, SnapKV
from kv_policy import DROP, Budget, Observe, parse
from kv_policy.testing import check_policy


def by_hand(policy: KVCrush, position: Tensor, score: Tensor, budget: int) -> list[list[int]]:
    """Return the tokens that each head of a layer keeps."""
    heads = [worth(p, s) for p, s in zip(position, score, strict=True)]
    bits = [set(best(mine, budget)) for mine in heads]
    stand = floor((budget - policy.window) * policy.share + 1e-6)
    if policy.anchor == "mean":
        anchor = [2 * len(ones) > len(mine) for ones, mine in zip(bits, heads, strict=True)]
    else:
        anchor = [h % 2 == 1 for h in range(len(heads))]

    def far(p: int) -> int:
        return sum((p in bits[h]) != anchor[h] for h in range(len(heads)) if p in heads[h])

    found = []
    for mine in heads:
        kept = best(mine, budget - stand)
        rest = sorted(set(mine) - set(kept), key=lambda p: (far(p), p))
        buckets = min(stand, len(rest))
        ends = [(j + 1) * len(rest) for j in range(buckets)]
        found.append(sorted([*kept, *(rest[-(-end // buckets) - 1] for end in ends)]))
    return found


@given(
    seed=st.integers(0, 999),
    window=st.integers(1, 6),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    anchor=st.sampled_from(["mean", "alternating"]),
)
@quick
def test_heads_keep_the_best_and_one_of_every_bucket(
    seed: int,
    window: int,
    more: tuple[int, int],
    lengths: tuple[int, int],
    share: float,
    anchor: str,
) -> None:
    policy = KVCrush.from_text({"window": str(window), "share": str(share), "anchor": anchor})
    assert isinstance(policy, KVCrush)
    old = [max(length - 5, 0) for length in lengths]
    position, budgets = ragged(seed, 1, lengths, old), [window + m for m in more]
    plan, score = plan_at_random(policy, position, lengths, budgets, seed)
    for b, budget in enumerate(budgets):
        wanted = by_hand(policy, position[0, b], score[0, b], budget)
        for h, kept in enumerate(wanted):
            assert position[0, b, h][plan[0, b, h] != DROP].tolist() == kept
            assert len(kept) == min(budget, int((position[0, b, h] >= 0).sum()))


def test_without_a_share_it_is_snapkv() -> None:
    position, lengths = ragged(3, 1, [50, 20], [9, 4]), [50, 20]
    mine, _ = plan_at_random(KVCrush(window=4, share=0.0), position, lengths, [15, 9])
    other, _ = plan_at_random(SnapKV(window=4), position, lengths, [15, 9])
    assert torch.equal(mine, other)


def test_scores_are_those_of_snapkv() -> None:
    check_scores_of_snapkv(KVCrush)


@pytest.mark.parametrize(
    "policy",
    [
        KVCrush(),
        KVCrush(Budget(9), window=8, pool=3, share=1.0),
        KVCrush(Budget(30, "percent"), window=5, share=0.5, anchor="alternating"),
    ],
    ids=str,
)
def test_the_contract_holds(policy: KVCrush) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = KVCrush(Budget(64), window=16)
    assert policy.observe == Observe(last=16)
    assert (policy.protected, policy.decode, policy.scope) == (16, "grow", "layer")
    assert not policy.capabilities.splits_heads


def test_text_form_and_what_it_refuses() -> None:
    policy = KVCrush(Budget(64), share=0.5, anchor="alternating")
    assert str(policy) == "kvcrush:budget=64,share=0.5,anchor=alternating"
    assert parse(str(policy)) == policy
    for text, message in (
        ("kvcrush:share=2", "kvcrush: share=2 is refused"),
        ("kvcrush:anchor=random", "kvcrush: anchor=random is refused"),
        ("kvcrush:budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(text)
