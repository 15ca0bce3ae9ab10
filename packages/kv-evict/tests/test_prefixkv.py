"""PrefixKV: all layers keep prefixes of their best tokens that hold the same share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import check_scores_of_snapkv, plan_view, quick, ragged
from kv_evict import PrefixKV
from kv_policy import DROP, Budget, Observe, parse
from kv_policy.testing import check_policy


def steep_scores(seed: int, layers: int, lengths: tuple[int, int], window: int) -> torch.Tensor:
    """Return scores [N B 3 L] of the same tokens in all heads, of layers that differ much."""
    draw = torch.Generator().manual_seed(seed)
    score = torch.rand(layers, 2, 3, max(lengths), generator=draw, dtype=torch.float64)
    score = score.pow(torch.rand(layers, 1, 1, 1, generator=draw) * 12)
    newest = torch.tensor(lengths)[:, None, None] - window
    return score.masked_fill(torch.arange(max(lengths)) >= newest, torch.inf)


@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 5),
    window=st.integers(1, 6),
    more=st.integers(0, 30),
    lengths=st.tuples(st.integers(8, 50), st.integers(8, 50)),
)
@quick
def test_prefixes_reach_one_share_and_use_the_budget(
    seed: int, layers: int, window: int, more: int, lengths: tuple[int, int]
) -> None:
    policy, budget = PrefixKV(window=window), window + more
    score = steep_scores(seed, layers, lengths, window)
    place = torch.arange(max(lengths))
    position = torch.where(place < torch.tensor(lengths)[:, None, None], place, -1)
    position = position.expand(layers, 2, 3, -1)
    plan = policy.plan(plan_view(score, position, lengths, [budget] * 2))
    for b, length in enumerate(lengths):
        counts = (plan[:, b] != DROP).sum(-1)
        assert (counts == counts[:, :1]).all()  # of all heads of a layer
        older = length - window
        kept = [min(int(c), length) - window for c in counts[:, 0].tolist()]
        assert sum(kept) == min(more, max(older, 0)) * layers
        # The share of the last token of any prefix is below that of the first one left out.
        reached, beyond = [], []
        for n, count in enumerate(kept):
            best = score[n, b, :, :older].sort(-1, descending=True).values
            profile = (best.cumsum(-1) / best.sum(-1, keepdim=True)).mean(0)
            reached += profile[count - 1 : count].tolist() if count else []
            beyond += profile[count : count + 1].tolist()
        if reached and beyond:
            assert max(reached) <= min(beyond) + 2**-23


def test_a_layer_with_dispersed_attention_keeps_more() -> None:
    policy, length = PrefixKV(window=1), 41
    flat, steep = torch.ones(40), 0.5 ** torch.arange(40.0)
    score = torch.stack([flat, steep])[:, None, None].expand(2, 1, 3, 40)
    score = torch.nn.functional.pad(score, (0, 1), value=torch.inf)
    position = torch.arange(length).expand(2, 1, 3, length)
    plan = policy.plan(plan_view(score, position, [length], [21]))
    many, few = (plan != DROP).sum(-1)[:, 0, 0].tolist()
    assert many + few == 42
    assert many > 3 * few


@pytest.mark.parametrize("tokens", [1, 3, 20, 44])
def test_a_prompt_that_fits_the_budget_is_kept_whole(tokens: int) -> None:
    position = ragged(0, 3, [tokens], [0])
    score = torch.rand(position.shape).masked_fill(position >= tokens - 4, torch.inf)
    plan = PrefixKV(window=4).plan(plan_view(score, position, [tokens], [44]))
    assert torch.equal(plan != DROP, position >= 0)


def test_scores_are_those_of_snapkv() -> None:
    check_scores_of_snapkv(PrefixKV)


@pytest.mark.parametrize(
    "policy",
    [PrefixKV(), PrefixKV(Budget(9), window=8, pool=3), PrefixKV(Budget(30, "percent"), window=5)],
    ids=str,
)
def test_the_contract_holds(policy: PrefixKV) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = PrefixKV(Budget(64), window=16)
    assert policy.observe == Observe(last=16)
    assert (policy.protected, policy.decode, policy.scope) == (16, "grow", "model")


def test_text_form_and_what_it_refuses() -> None:
    policy = PrefixKV(Budget(50, "percent"), window=16)
    assert str(policy) == "prefixkv:budget=50%,window=16"
    assert parse(str(policy)) == policy
    with pytest.raises(ValueError, match="a budget of 16 tokens is smaller than the 32"):
        parse("prefixkv:budget=16")
    with pytest.raises(ValueError, match="prefixkv has no parameter 'beta'"):
        parse("prefixkv:beta=2")
