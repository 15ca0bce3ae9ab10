import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import LENGTHS, SHAPE, STORED, plan_view, quick, ragged, step, worth
from kv_evict import FastGen
from kv_policy import DROP, LayerView, Observe, PlanView, complete, parse
from kv_policy.testing import check_policy


@given(st.integers(0, 999), st.sampled_from([1, 4, 64]), st.sampled_from([0, 2, 4]))
@quick
def test_a_score_is_the_average_attention_and_1_more_for_a_sink(
    seed: int, window: int, sinks: int
) -> None:
    draw, position = torch.Generator().manual_seed(seed), ragged(seed)[0]
    there, before = position >= 0, torch.tensor(STORED)[:, None, None]
    length = torch.tensor(LENGTHS)[:, None, None]
    watched = torch.maximum(before, length - window)
    seen = (length - torch.maximum(watched, position + 1)).masked_fill(~there, 0)
    mass = torch.rand(position.shape, generator=draw, dtype=torch.float64) * seen
    average = torch.rand(position.shape, generator=draw, dtype=torch.float64)
    stored = there & (position < before)
    found = FastGen(window=window, sinks=sinks).score(
        LayerView(
            layer=torch.zeros_like(torch.tensor(LENGTHS)),
            shape=SHAPE,
            position=position,
            fresh=there & ~stored,
            score=((position < sinks) + average).masked_fill(~stored, 0),
            length=torch.tensor(LENGTHS),
            mass=mass,
            seen=seen,
        )
    )
    for b, h, i in there.nonzero().tolist():
        p = int(position[b, h, i])
        past = min(max(STORED[b] - 1 - p, 0), window)  # queries behind `average`
        got = past * average[b, h, i].item() + mass[b, h, i].item()
        share = got / max(past + seen[b, h, i].item(), 1)
        assert found[b, h, i].item() == pytest.approx(share + (p < sinks))


def test_scores_go_on_from_pass_to_pass() -> None:
    attention = torch.rand(20, 20, dtype=torch.float64).tril(-1)  # query, token
    score = torch.zeros(1, 1, 0, dtype=torch.float64)
    for start, end in pairwise((0, 6, 13, 18, 19, 20)):
        position = torch.arange(end)[None, None]
        score = FastGen(sinks=2).score(
            LayerView(
                layer=torch.tensor([0]),
                shape=SHAPE,
                position=position,
                fresh=position >= start,
                score=torch.cat([score, score.new_zeros(1, 1, end - start)], -1),
                length=torch.tensor([end]),
                mass=attention[start:end, :end].sum(0)[None, None],
                seen=end - torch.maximum(torch.tensor(start), position + 1),
            )
        )
    for p in range(20):
        later = attention[p + 1 :, p]
        mean = later.sum().item() / max(len(later), 1)
        assert score[0, 0, p].item() == pytest.approx(mean + (p < 2))


def whole(score: Tensor, position: Tensor, lengths: Sequence[int]) -> PlanView:
    """Return the plan of a layer's scores and positions [B H L], without a budget."""
    return plan_view(score[None], position[None], lengths, lengths)


def by_hand(policy: FastGen, weight: dict[int, float], length: int) -> set[int]:
    """Return the positions that a head keeps: the cheapest strategy with enough attention."""
    sink = {p for p in weight if p < policy.sinks}
    local = {p for p in weight if p >= length - math.floor(length * policy.local)}
    order = sorted(set(weight) - sink, key=lambda p: (-weight[p], p))
    frequent = set(order[: math.floor(length * policy.frequent)])
    for kind in (sink, sink | local, sink | frequent, sink | local | frequent):
        if sum(weight[p] for p in kind) >= policy.recovery * sum(weight.values()):
            return kind
    return set(weight)


@given(
    seed=st.integers(0, 999),
    sinks=st.sampled_from([0, 1, 4]),
    recovery=st.sampled_from([0.2, 0.5, 0.8, 0.95]),
    local=st.sampled_from([0.0, 0.125, 0.25, 1.0]),  # exact, so that rounding does not decide
    frequent=st.sampled_from([0.0, 0.125, 0.25, 0.5]),
)
@quick
def test_a_head_keeps_the_cheapest_kind_that_holds_enough(
    seed: int, sinks: int, recovery: float, local: float, frequent: float
) -> None:
    policy = FastGen(recovery=recovery, local=local, frequent=frequent, sinks=sinks)
    draw, position = torch.Generator().manual_seed(seed), ragged(seed)[0]
    steep = torch.rand(2, 3, 1, generator=draw, dtype=torch.float64) * 12
    weight = torch.rand(position.shape, generator=draw, dtype=torch.float64).pow(steep)
    score = weight + (position < sinks)
    plan = policy.plan(whole(score, position, LENGTHS))[0]
    for b in range(2):
        for h in range(3):
            held = worth(position[b, h], weight[b, h])
            kept = set(position[b, h][plan[b, h] != DROP].tolist())
            assert kept == by_hand(policy, held, LENGTHS[b])


def looks(at: dict[int, float], tokens: int = 20) -> list[float]:
    """A head that gives these tokens these shares, and the others almost nothing."""
    return [at.get(p, 0.0001) for p in range(tokens)]


def test_each_head_has_the_strategy_that_suits_it() -> None:
    heads = {
        "sinks": (looks({0: 0.7, 1: 0.3}), [0, 1]),
        "local": (looks({0: 0.4, 17: 0.1, 18: 0.2, 19: 0.3}), [0, 1, *range(15, 20)]),
        "frequent": (looks({0: 0.4, 7: 0.3, 9: 0.2}), [0, 1, 7, 9]),
        "both": (looks({0: 0.4, 7: 0.3, 9: 0.2, 16: 0.1, 17: 0.1}), [0, 1, 7, 9, *range(15, 20)]),
        "spread out": ([0.05] * 20, list(range(20))),
    }
    policy = FastGen(local=0.25, frequent=0.1, sinks=2)
    position = torch.arange(20).expand(1, len(heads), 20)
    score = torch.tensor([[weight for weight, _ in heads.values()]]).double() + (position < 2)
    view = whole(score, position, [20])
    plan = policy.plan(view)[0, 0]
    for (name, (_, kept)), tiers in zip(heads.items(), plan, strict=True):
        assert (tiers != DROP).nonzero().flatten().tolist() == kept, name
    shares = [len(kept) / 20 for _, kept in heads.values()]
    assert policy.tier_thresholds(view).flatten().tolist() == pytest.approx(shares)


def test_of_two_kinds_that_hold_enough_the_local_one_is_taken() -> None:
    position = torch.arange(20).expand(1, 1, 20)
    score = torch.tensor([[looks({0: 0.5, 19: 0.5})]]).double() + (position < 1)
    plan = FastGen(local=0.25, frequent=0.05, sinks=1).plan(whole(score, position, [20]))
    assert (plan != DROP).flatten().nonzero().flatten().tolist() == [0, *range(15, 20)]


def test_a_share_is_of_the_tokens_seen_and_1_where_nothing_goes() -> None:
    position = torch.tensor([[[0, 1, 8, 9], [-1, -1, -1, -1], [0, 1, 8, 9]]])
    score = torch.tensor([[[1.9, 1.1, 0, 0], [0.0] * 4, [1.1, 1.1, 0.1, 0.1]]])
    view = whole(score, position, [10])
    tier_thresholds = FastGen(sinks=2, local=0.0, frequent=0.0).tier_thresholds(view)
    assert tier_thresholds.flatten().tolist() == pytest.approx([0.2, 1, 1])


def test_a_prompt_of_one_token_stays() -> None:
    position = torch.zeros(1, 1, 1, dtype=torch.long)
    view = whole(torch.zeros(1, 1, 1), position, [1])
    assert FastGen(sinks=0).plan(view).flatten().tolist() == [0]


def test_the_arriving_token_joins_and_the_least_attended_goes() -> None:
    held = {0: 1.2, 3: 0.1, 8: 0.05, 9: 0.3}
    assert step(FastGen(), held, 10, 0.0, budget=11, share=0.25) == [0, 3, 9, 10]
    # 6 of 11 may be kept
    assert step(FastGen(), held, 10, 0.0, budget=11, share=0.5) == [0, 3, 8, 9, 10]
    assert step(FastGen(), held, 10, 0.0, budget=11, share=1.0) == [0, 3, 8, 9, 10]
    assert step(FastGen(), {}, 10, 0.0, budget=11, share=0.25) == [10]
    assert step(FastGen(), {}, 10, 0.0, budget=11, share=0.0) == [10]  # no victim


@given(st.integers(1, 32), st.integers(0, 31), st.integers(0, 999))
@quick
def test_a_head_keeps_its_share_while_the_sequence_grows(
    prompt: int, dropped: int, seed: int
) -> None:
    kept, draw = max(prompt - dropped, 1), torch.Generator().manual_seed(seed)
    share = kept / prompt
    held = {p: torch.rand((), generator=draw).item() for p in range(kept)}
    for at in range(prompt, prompt + 40):
        score = torch.rand((), generator=draw).item()
        weakest = min(held, key=lambda p: held[p])
        after = step(FastGen(), held, at, score, at + 1, share)
        grown = {**held, at: score}
        held = {p: grown[p] for p in after}
        assert set(grown) - set(held) <= {weakest}
        # a tolerance, because a share of the length is seldom exact
        assert (at + 1) * share - 1e-6 <= len(held) <= (at + 1) * share + 1 + 1e-6


@pytest.mark.parametrize(
    "policy",
    [
        FastGen(),
        FastGen(recovery=0.5, sinks=1, window=5),
        FastGen(recovery=1.0, local=0.0, frequent=1.0, sinks=0),
    ],
    ids=str,
)
def test_the_contract_holds(policy: FastGen) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = FastGen(window=16)
    assert policy.observe == Observe(last=16, skip=1, generated=True)
    assert policy.budget is None
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (0, "step", "layer", 1)
    assert complete(policy).recent_tokens(torch.tensor([9])) is None
    assert not policy.reads
    assert policy.capabilities.shortens
    assert policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = FastGen(recovery=0.9, local=0.25, frequent=0.5, sinks=0, window=16)
    assert str(policy) == "fastgen:recovery=0.9,local=0.25,frequent=0.5,sinks=0,window=16"
    assert parse(str(policy)) == policy
    assert parse("fastgen") == FastGen()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recovery=0", "fastgen: recovery=0 is refused"),
        ("recovery=1.1", "fastgen: recovery=1.1 is refused"),
        ("local=-0.1", "fastgen: local=-0.1 is refused"),
        ("frequent=2", "fastgen: frequent=2 is refused"),
        ("sinks=-1", "fastgen: sinks=-1 is refused"),
        ("window=0", "fastgen: window=0 is refused"),
        ("budget=64", "fastgen has no parameter 'budget'; its parameters: recovery, local"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"fastgen:{text}")
