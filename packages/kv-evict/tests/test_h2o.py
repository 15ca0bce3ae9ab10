import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import LENGTHS, SHAPE, STORED, plan_view, quick, ragged, step
from kv_evict import H2O
from kv_policy import DROP, Budget, LayerView, Observe, parse
from kv_policy.testing import check_policy


def view_of(position: Tensor, mass: Tensor, score: Tensor, length: list[int]) -> LayerView:
    return LayerView(
        layer=torch.zeros_like(torch.tensor(length)),
        shape=SHAPE,
        position=position,
        fresh=position >= torch.tensor(STORED)[: len(length), None, None],
        score=score,
        length=torch.tensor(length),
        mass=mass,
        seen=torch.ones_like(position),
    )


@given(st.integers(0, 999))
@quick
def test_a_score_is_what_was_carried_and_what_this_pass_gave(seed: int) -> None:
    draw, position = torch.Generator().manual_seed(seed), ragged(seed, least=1)[0]
    mass = torch.rand(position.shape, generator=draw, dtype=torch.float64)
    view = view_of(position, mass, mass.flip(-1), list(LENGTHS))
    score = view.score.masked_fill(view.fresh, 0)
    found = H2O().score(view_of(position, mass, score, list(LENGTHS)))
    for b in range(2):
        for h in range(3):
            for i, p in enumerate(position[b, h].tolist()):
                if p >= 0:
                    old = score[b, h, i].item() if p < STORED[b] else 0.0
                    assert found[b, h, i].item() == old + mass[b, h, i].item()


def test_passes_add_up_to_all_the_attention_a_token_got() -> None:
    attention = torch.rand(12, 12, dtype=torch.float64).tril()  # query, token
    score = torch.zeros(1, 1, 0, dtype=torch.float64)
    for start, end in pairwise((0, 5, 10, 11, 12)):
        mass = attention[start:end, :end].sum(0)[None, None]
        score = torch.cat([score, score.new_zeros(1, 1, end - start)], -1)
        score = H2O().score(view_of(torch.arange(end)[None, None], mass, score, [end]))
    assert score.flatten().tolist() == pytest.approx(attention.sum(0).tolist())


@given(
    st.integers(0, 999),
    st.tuples(st.integers(1, 30), st.integers(1, 12)),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
@quick
def test_the_newest_tokens_stay_and_the_best_of_the_others(
    seed: int, budget: tuple[int, int], share: float
) -> None:
    position = ragged(seed, least=1)[0]
    # few distinct values, so that some are equal
    score = torch.randint(0, 9, position.shape, generator=torch.Generator().manual_seed(seed))
    view = plan_view(score.double()[None], position[None], LENGTHS, budget)
    plan = H2O(recent=share).plan(view)[0]
    for b in range(2):
        for h in range(3):
            places = [i for i, p in enumerate(position[b, h].tolist()) if p >= 0]
            recent = math.floor(budget[b] * share)
            newest = [i for i in places if position[b, h, i] >= LENGTHS[b] - recent]
            others = sorted(set(places) - set(newest), key=lambda i: (-score[b, h, i].item(), i))
            kept = {*newest, *others[: budget[b] - len(newest)]}
            assert {i for i, t in enumerate(plan[b, h].tolist()) if t != DROP} == kept
            assert len(kept) == min(budget[b], len(places))


def test_a_part_of_a_token_is_not_shielded() -> None:
    budget = torch.tensor([1, 2, 9, 10])
    assert H2O().recent_tokens(budget).tolist() == [0, 1, 4, 5]
    assert H2O(recent=0.0).recent_tokens(budget).tolist() == [0] * 4
    assert H2O(recent=1.0).recent_tokens(budget).tolist() == [1, 2, 9, 10]


@given(
    st.permutations(range(20)),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
@quick
def test_a_full_head_lets_its_weakest_token_go_but_none_of_the_newest(
    scores: list[int], budget: int, share: float
) -> None:
    policy, held, recent = H2O(recent=share), {}, math.floor(budget * share)
    for at, score in enumerate(scores):
        expected = {**held, at: score}
        if len(expected) > budget:
            old = [p for p in expected if p <= at - recent]
            del expected[min(old, key=lambda p: expected[p])]
        assert step(policy, held, at, score, budget) == sorted(expected)
        held = expected


def test_without_recent_tokens_a_candidate_that_is_no_better_is_the_one_to_go() -> None:
    held = {0: 3.0, 4: 1.0}
    assert step(H2O(recent=0.0), held, 7, 1.0, budget=2) == [0, 4]
    assert step(H2O(recent=0.0), held, 7, 1.5, budget=2) == [0, 7]
    assert step(H2O(recent=0.5), held, 7, 0.0, budget=2) == [0, 7]
    assert step(H2O(recent=0.0), held, 7, 0.0, budget=3) == [0, 4, 7]


@pytest.mark.parametrize(
    "policy",
    [H2O(), H2O(Budget(9), recent=0.0), H2O(Budget(30, "percent"), recent=1.0, group="max")],
    ids=str,
)
def test_the_contract_holds(policy: H2O) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = H2O(Budget(64), group="sum")
    assert policy.observe == Observe(last=None, group="sum", generated=True)
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (0, "step", "layer", 1)
    assert not policy.reads
    assert policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = H2O(Budget(25, "percent"), recent=0.25, group="max")
    assert str(policy) == "h2o:budget=25%,recent=0.25,group=max"
    assert parse(str(policy)) == policy
    assert parse("h2o") == H2O()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h2o:budget=0", "budget=0 is refused"),
        ("h2o:recent=1.5", "h2o: recent=1.5 is refused"),
        ("h2o:recent=-0.1", "h2o: recent=-0.1 is refused"),
        ("h2o:group=all", "h2o: group=all is refused"),
        ("h2o:window=4", "h2o has no parameter 'window'; its parameters: budget, recent, group"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@given(st.integers(0, 5000), st.integers(0, 100))
def test_a_share_in_whole_percents_is_rounded_down_exactly(budget: int, percent: int) -> None:
    recent_tokens = H2O(recent=percent / 100).recent_tokens(torch.tensor([budget]))
    assert recent_tokens.tolist() == [budget * percent // 100]
