import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import keyed, planned, quick
from kv_evict import LagKV
from kv_policy import DROP, Budget, LayerView, parse
from kv_policy.testing import check_policy


def ragged(seed: int) -> LayerView:
    """Heads that hold different stored tokens, with keys and values."""
    view, draw = keyed(seed), torch.Generator().manual_seed(seed + 1000)
    values = torch.randn(*view.position.shape, 5, generator=draw, dtype=torch.float64)
    return replace(view, values=values.masked_fill(view.position[..., None] < 0, 0))


def spreads(rows: list[list[float]], reference: list[list[float]]) -> list[float]:
    """By definition: the softmax of the deviation over scaled channels."""
    low = [min(channel) for channel in zip(*reference, strict=True)]
    high = [max(channel) for channel in zip(*reference, strict=True)]
    found = [
        statistics.stdev((x - a) / (b - a) for x, a, b in zip(row, low, high, strict=True))
        for row in rows
    ]
    weights = [math.exp(x - max(found)) for x in found]
    return [x / sum(weights) for x in weights]


def check_by_hand(
    found: list[float], keys: list[list[float]], values: list[list[float]], sinks: int, lag: int
) -> None:
    """Compare the scores of a head's tokens with the definition, chunk by chunk."""
    end = sinks
    for first in range(sinks, len(keys) - 2 * lag + 1, lag):
        end = first + lag
        both = (spreads(x[first:end], x[end : end + lag]) for x in (keys, values))
        total = [a + b for a, b in zip(*both, strict=True)]
        assert sorted(found[first:end]) == list(range(1 - lag, 1))
        ranked = sorted(range(lag), key=lambda i: found[first + i])
        for lower, higher in pairwise(ranked):
            assert total[lower] <= total[higher] * (1 + 2**-11)
    assert found[:sinks] + found[end:] == [math.inf] * (len(keys) - end + min(sinks, len(keys)))


@given(st.integers(0, 999), st.integers(0, 5), st.integers(2, 7))
@quick
def test_a_score_is_the_rank_in_the_chunk_by_the_scale_of_the_next(
    seed: int, sinks: int, lag: int
) -> None:
    view = ragged(seed)
    assert view.keys is not None
    assert view.values is not None
    found = LagKV(sinks=sinks, lag=lag).score(view)
    for b in range(2):
        for h in range(3):
            there = view.position[b, h] >= 0
            rows = (x[b, h][there].tolist() for x in (view.keys, view.values))
            check_by_hand(found[b, h][there].tolist(), *rows, sinks, lag)


@given(st.integers(0, 99))
@quick
def test_stretching_a_channel_changes_nothing(seed: int) -> None:
    view, policy = ragged(seed), LagKV(sinks=1, lag=4)
    assert view.keys is not None
    stretch = torch.arange(1, view.keys.shape[-1] + 1, dtype=torch.float64)
    other = replace(view, keys=view.keys * stretch + 3)
    there = view.position >= 0
    assert policy.score(other)[there].tolist() == policy.score(view)[there].tolist()


def test_chunks_keep_alike_and_both_ends_stay() -> None:
    length, lag = 45, 8
    draw = torch.Generator().manual_seed(0)
    position = torch.arange(length).expand(1, 2, length)
    keys, values = torch.randn(2, 1, 2, length, 6, generator=draw)
    view = LayerView(
        layer=torch.tensor([0]),
        shape=keyed(0).shape,
        position=position,
        fresh=position >= 0,
        score=torch.zeros(1, 2, length),
        length=torch.tensor([length]),
        keys=keys,
        values=values,
    )
    policy = LagKV(sinks=3, lag=lag)
    assert policy.protected == 18
    kept = planned(policy, view, [3 + 10 + 18])[0] != DROP
    for head in kept:
        assert head[:3].all()
        # 42 after the sinks are 5 chunks and 2 more: 4 have a whole following chunk.
        assert head[3:35].view(4, lag).sum(1).tolist() == [5, 5, 4, 4]
        assert head[35:].all()


def test_of_tokens_that_vary_alike_the_earlier_stay() -> None:
    view = ragged(2)
    assert view.keys is not None
    assert view.values is not None
    same = replace(view, keys=torch.ones_like(view.keys), values=torch.ones_like(view.values))
    found = LagKV(sinks=0, lag=4).score(same)[0, 0]
    assert found[:4].tolist() == [0, -1, -2, -3]


def test_a_channel_that_does_not_vary_says_nothing() -> None:
    view = ragged(1)
    assert view.keys is not None
    flat = view.keys.clone()
    flat[..., 0] = 2.0
    score = LagKV(sinks=0, lag=3).score(replace(view, keys=flat))
    assert not score[view.position >= 0].isnan().any()


@pytest.mark.parametrize("length", [1, 2, 5, 9, 10])
def test_a_text_shorter_than_two_chunks_stays_whole(length: int) -> None:
    view = ragged(0)
    assert view.keys is not None
    assert view.values is not None
    cut = replace(
        view,
        position=view.position[..., :length],
        fresh=view.fresh[..., :length],
        score=view.score[..., :length],
        keys=view.keys[..., :length, :],
        values=view.values[..., :length, :],
    )
    assert LagKV(sinks=3, lag=4).score(cut).eq(torch.inf).all()


@pytest.mark.parametrize(
    "policy",
    [LagKV(), LagKV(Budget(13), sinks=2, lag=6), LagKV(Budget(30, "percent"), sinks=0, lag=3)],
    ids=str,
)
def test_the_contract_holds(policy: LagKV) -> None:
    check_policy(policy)


def test_text_form_and_what_it_refuses() -> None:
    policy = LagKV(Budget(64), sinks=2, lag=16)
    assert str(policy) == "lagkv:budget=64,sinks=2,lag=16"
    assert parse(str(policy)) == policy
    assert parse("lagkv") == LagKV()
    for text, message in (
        ("lagkv:lag=1", "lag=1 is refused"),
        ("lagkv:sinks=-1", "sinks=-1 is refused"),
        ("lagkv:budget=256", "a budget of 256 tokens is smaller than the 259 it protects"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(text)
