"""KVzip: its scores, plans and errors; `kv-transformers` compares scores with whole attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kv_evict import KVzip
from kv_policy import (
    DROP,
    FRESH,
    Budget,
    CacheShape,
    LayerView,
    PlanView,
    Replay,
    complete,
    parse,
)
from kv_policy.testing import check_policy

SHAPE = CacheShape(layers=2, kv_heads=3, group=2, key_dim=8, value_dim=8)


@pytest.mark.parametrize(
    "text",
    [
        "kvzip:budget=32",
        "kvzip:keep=25%",
        "kvzip:budget=64,pool=5,sinks=0,recent=16",
        "kvzip:budget=40,chunk=99,layers=even",
        "kvzip:keep=25%+leankv:high=raw,low=raw,window=3",
        "kvzip:budget=64+leankv:high=raw,low=raw",
    ],
)
def test_it_satisfies_the_contract(text: str) -> None:
    policy = parse(text)
    assert parse(str(policy)) == policy
    check_policy(policy)
    assert complete(policy.selector).replay is not None


def view(replayed: Tensor | None, score: Tensor, before: int, generated: bool = False) -> LayerView:
    length = score.shape[-1]
    position = torch.arange(length).expand(score.shape)
    return LayerView(
        layer=torch.tensor([0]),
        shape=SHAPE,
        position=position,
        fresh=position >= before,
        score=score,
        length=torch.tensor([length]),
        replayed=replayed,
        generated=generated,
    )


@given(st.integers(0, 20), st.integers(0, 6), st.sampled_from([1, 3, 7]))
def test_fresh_tokens_have_their_largest_probability_and_stored_ones_their_score(
    before: int, generated: int, size: int
) -> None:
    torch.manual_seed(before)
    length = before + generated + 12
    score = torch.rand(1, 3, length)
    score[..., before:] = 0  # generated tokens were never scored
    replayed = torch.rand(1, 3, length).clamp(min=0.01)
    replayed[..., : before + generated] = 0
    got = KVzip(pool=size).score(view(replayed, score, before + generated))
    assert torch.equal(got[..., :before], score[..., :before])
    assert bool((got[..., before : before + generated] == 1).all())
    for i in range(before + generated, length):
        near = range(max(before + generated, i - size // 2), min(length, i + size // 2 + 1))
        want = torch.stack([replayed[..., j] for j in near]).amax(0)
        assert torch.equal(got[..., i], want)


def test_a_token_that_no_query_attends_to_was_read_again_all_the_same() -> None:
    policy = KVzip()
    found = policy.score(view(torch.zeros(1, 3, 9), torch.zeros(1, 3, 9), 0))
    assert bool((found > 0).all())
    assert bool((found < 1e-30).all())
    assert torch.equal(policy.score(view(torch.zeros(1, 3, 9), found, 9)), found)


def test_a_generated_token_counts_as_certain() -> None:
    score = torch.rand(1, 3, 9)
    score[..., 8] = 0
    got = KVzip().score(view(None, score, 8, generated=True))
    assert torch.equal(got[..., :8], score[..., :8])
    assert bool((got[..., 8] == 1).all())


def plan_view(score: Tensor, budget: int) -> PlanView:
    length = score.shape[-1]
    return PlanView(
        shape=SHAPE,
        first_layer=0,
        score=score,
        position=torch.arange(length).expand(score.shape),
        tier=torch.full(score.shape, FRESH, dtype=torch.uint8),
        length=torch.tensor([length]),
        budget=torch.tensor([budget]),
        page=torch.tensor([1]),
    )


def test_the_highest_scores_of_all_heads_and_layers_stay() -> None:
    score = torch.rand(2, 1, 3, 50, generator=torch.Generator().manual_seed(1))
    kept = KVzip(Budget(16), sinks=2, recent=3).plan(plan_view(score, 16)) != DROP
    score[..., :2] = score[..., -3:] = torch.inf
    best = score.flatten().argsort(descending=True)[: 16 * 6]
    assert torch.equal(kept.flatten().nonzero().flatten(), best.sort().values)


def test_even_layers_plan_alone() -> None:
    assert KVzip().scope == "model"
    assert KVzip(layers="even").scope == "layer"
    assert not KVzip(layers="even").capabilities.splits_heads


def test_it_asks_to_repeat_the_prompt() -> None:
    replay = KVzip(chunk=500).replay
    assert replay == Replay(
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with ",
        quoted=8,
        tokens=500,
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kvzip:budget=11", "a budget of 11 tokens is smaller than the 12 it protects"),
        ("kvzip:budget=64,pool=2", "pool=2 has no middle; use an odd number, such as 3"),
        ("kvzip:chunk=7", "chunk=7 is refused"),
        ("kvzip:budget=64,keep=25%", "keep=25% and budget=64 both set how much is kept"),
        ("kvzip:layers=some", "layers=some is refused"),
    ],
)
def test_wrong_parameters_are_refused_by_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        parse(text)
