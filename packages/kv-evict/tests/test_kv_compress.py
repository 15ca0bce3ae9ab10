"""KV-Compress: its metrics by their formulas, its plans, and its errors."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kv_evict import KVCompress
from kv_policy import (
    DROP,
    FRESH,
    Budget,
    CacheShape,
    CompositionError,
    LayerView,
    PlanView,
    Replan,
    compose,
    parse,
)
from kv_policy.testing import check_policy

SHAPE = CacheShape(layers=2, kv_heads=3, group=2, key_dim=8, value_dim=8)


@pytest.mark.parametrize(
    "text",
    [
        "kv-compress:budget=32",
        "kv-compress:rate=8",
        "kv-compress:rate=2.5,floor=16,sinks=4",
        "kv-compress:budget=32,window=full,skip=3",
        "kv-compress:budget=40,layers=even,power=1,pool=1",
        "kv-compress:budget=64,every=16,recent=12",
        "kv-compress:budget=64,uncompressed=100,short=true,most=5000",
        "kv-compress:budget=64+leankv:high=raw,low=raw",
        "snapkv:budget=64+leankv:high=raw,low=raw,window=3,t_low=0.01",
    ],
)
def test_it_satisfies_the_contract(text: str) -> None:
    policy = parse(text)
    assert parse(str(policy)) == policy
    check_policy(policy)


def view(attention: Tensor, score: Tensor, before: int, window: int | None, skip: int) -> LayerView:
    """Return the view after a pass with queries whose `attention` is [H, G, L', L]."""
    heads, _, queries, length = attention.shape
    position = torch.arange(length).expand(1, heads, length)
    query = torch.arange(before, before + queries)
    counts = query[:, None] >= torch.arange(length) + skip
    if window is not None:
        counts &= (query >= length - window)[:, None]
    mass = (attention.square() * counts).sum((1, 2))[None]
    return LayerView(
        layer=torch.tensor([0]),
        shape=SHAPE,
        position=position,
        fresh=position >= before,
        score=score,
        length=torch.tensor([length]),
        mass=mass,
        seen=counts.sum(0).expand(1, heads, length),
    )


def random_attention(length: int) -> Tensor:
    """Causal attention of 3 heads of 2 query heads."""
    place = torch.arange(length)
    # The nearest tokens get the most, as in real models.
    x = torch.randn(3, 2, length, length).double() - 0.7 * (place[:, None] - place)
    return x.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)


def test_the_metric_of_a_window_is_squared_summed_and_pooled() -> None:
    attention = random_attention(29)
    policy = KVCompress(Budget(16), window=5, pool=3)
    got = policy.score(view(attention, torch.zeros(1, 3, 29).double(), 0, 5, 0))
    raw = attention[:, :, -5:].square().sum((1, 2)) / 5
    for h in range(3):
        for j in range(24):
            near = [raw[h, i] for i in range(max(0, j - 1), min(24, j + 2))]
            torch.testing.assert_close(got[0, h, j], max(near))


def test_the_full_metric_leaves_out_the_nearest_queries() -> None:
    attention = random_attention(29)
    policy = KVCompress(Budget(16), window="full", skip=4)
    got = policy.score(view(attention, torch.zeros(1, 3, 29).double(), 0, None, 4))
    for h in range(3):
        for j in range(29):
            expected = attention[h, :, j + 4 :, j].square().sum()
            torch.testing.assert_close(got[0, h, j], expected)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_the_full_metric_is_the_same_in_parts(parts: list[int]) -> None:
    length = sum(parts)
    torch.manual_seed(length)
    attention = random_attention(length)
    policy = KVCompress(Budget(16), window="full", skip=2)
    whole = policy.score(view(attention, torch.zeros(1, 3, length).double(), 0, None, 2))
    score, end = torch.zeros(1, 3, 0).double(), 0
    for part in parts:
        start, end = end, end + part
        score = torch.cat([score, score.new_zeros(1, 3, part)], -1)
        score = policy.score(view(attention[:, :, start:end, :end], score, start, None, 2))
    torch.testing.assert_close(score, whole)


@given(st.lists(st.integers(5, 12), min_size=1, max_size=4))
def test_the_metric_of_a_window_is_the_same_in_parts_no_shorter_than_it(parts: list[int]) -> None:
    length = sum(parts)
    torch.manual_seed(length)
    attention = random_attention(length)
    policy = KVCompress(Budget(16), window=5)
    whole = policy.score(view(attention, torch.zeros(1, 3, length).double(), 0, 5, 0))
    score, end = torch.zeros(1, 3, 0).double(), 0
    for part in parts:
        start, end = end, end + part
        score = torch.cat([score, score.new_zeros(1, 3, part)], -1)
        score = policy.score(view(attention[:, :, start:end, :end], score, start, 5, 0))
    torch.testing.assert_close(score, whole)


def test_a_short_part_counts_for_its_share_of_the_window() -> None:
    attention = random_attention(30)
    policy = KVCompress(Budget(16), window=8, pool=1)
    old = policy.score(view(attention[:, :, :28, :28], torch.zeros(1, 3, 28).double(), 0, 8, 0))
    padded = torch.cat([old, old.new_zeros(1, 3, 2)], -1)
    new = policy.score(view(attention[:, :, 28:], padded, 28, 8, 0))
    recent = attention[:, :, 28:, :20].square().sum((1, 2)) / 2
    torch.testing.assert_close(new[0, :, :20], 0.75 * old[0, :, :20] + 0.25 * recent)


def test_generated_queries_add_to_the_metric() -> None:
    before = torch.rand(1, 3, 12).double()
    attention = torch.rand(3, 2, 1, 12).double()
    policy = KVCompress(Budget(16), window=8, every=4)
    seen = replace(view(attention, before, 11, None, 0), generated=True)
    expected = before + attention.square().sum((1, 2))[None] / 8
    torch.testing.assert_close(policy.score(seen), expected)
    full = KVCompress(Budget(16), window="full", skip=0, every=4)
    expected = before + attention.square().sum((1, 2))[None]
    torch.testing.assert_close(full.score(seen), expected)


def plan_view(score: Tensor, budget: int, page: int = 4, tier: Tensor | None = None) -> PlanView:
    _, b, _, length = score.shape
    return PlanView(
        shape=SHAPE,
        first_layer=0,
        score=score,
        position=torch.arange(length).expand(score.shape),
        tier=torch.full(score.shape, FRESH, dtype=torch.uint8) if tier is None else tier,
        length=torch.full((b,), length),
        budget=torch.full((b,), budget),
        page=torch.tensor([page]),
    )


def test_heads_and_layers_that_need_more_keep_more_in_whole_pages() -> None:
    score = torch.rand(2, 1, 3, 64)
    score[1, 0, 2] += 10  # this head gets attention
    score[0, 0, 0] /= 100  # this one does not
    plan = KVCompress(Budget(16), window=8).plan(plan_view(score, 16))
    kept = (plan == 0).sum(-1)
    assert int(kept.sum()) == 16 * 6
    assert bool((kept % 4 == 0).all())
    assert kept[1, 0, 2] == 56  # all but two pages
    assert kept[0, 0, 0] == 8  # its newest tokens


def test_even_layers_keep_the_same_and_heads_do_not() -> None:
    score = torch.rand(1, 1, 3, 64)
    score[0, 0, 1] += 10
    policy = KVCompress(Budget(16), window=8, layers="even")
    assert policy.scope == "layer"
    kept = (policy.plan(plan_view(score, 16)) == 0).sum(-1).flatten().tolist()
    assert sum(kept) == 48
    assert kept[1] > kept[0]
    assert kept[1] > kept[2]


def test_sinks_and_the_newest_stay_whatever_they_got() -> None:
    score = torch.rand(2, 1, 3, 64) + 1
    score[..., :4] = 0
    score[..., -8:] = 0
    plan = KVCompress(Budget(16), window=8, sinks=4).plan(plan_view(score, 16))
    assert bool((plan[..., :4] == 0).all())
    assert bool((plan[..., -8:] == 0).all())


def test_a_sequence_within_its_budget_keeps_everything() -> None:
    score = torch.rand(2, 1, 3, 15)
    plan = KVCompress(Budget(15), window=8).plan(plan_view(score, 15, page=16))
    assert bool((plan == 0).all())


def test_stored_tokens_stay_in_their_tier_or_go() -> None:
    score = torch.rand(2, 1, 3, 64)
    tier = (torch.rand(score.shape) > 0.5).to(torch.uint8)
    view = replace(plan_view(score, 16, tier=tier), page=torch.tensor([4, 6]))
    plan = KVCompress(Budget(16), window=8).plan(view)
    assert bool(((plan == tier) | (plan == DROP)).all())
    assert int((plan != DROP).sum()) <= 16 * 6


def test_a_rate_is_a_share_of_the_tokens_seen() -> None:
    policy = KVCompress(rate=8)
    selector = policy.selector
    assert selector.budget == Budget(12.5, "percent")
    assert selector.protected == 128
    length = torch.tensor([4096, 512])
    assert selector.budget.resolve(length, 1, selector.protected).tolist() == [512, 128]


def test_keep_is_a_rate_where_that_is_whole_and_a_budget_elsewhere() -> None:
    # Policies in published results keep their names, and no share is rounded.
    assert str(parse("kv-compress:keep=25%")) == "kv-compress:rate=4"
    assert str(parse("kv-compress:keep=12.5%+raw")) == "kv-compress:rate=8+raw"
    assert str(parse("kv-compress:keep=30%,floor=64")) == "kv-compress:budget=30%,floor=64"
    length = torch.tensor([290, 900, 145])
    for rate in (29, 9):  # 100 / 29 and 100 / 9 are below the exact share
        selector = KVCompress(rate=rate).selector
        assert selector.budget.resolve(length, 1).tolist() == [n // rate for n in length.tolist()]


def test_it_plans_while_generating_only_if_asked() -> None:
    assert not KVCompress().observe.generated
    policy = parse("kv-compress:budget=64,every=16,most=900")
    assert policy.selector.replan == Replan(every=16, most=900)
    assert policy.selector.observe.generated
    assert not parse("kv-compress:budget=64,most=900").selector.observe.generated


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kv-compress:budget=7", "a budget of 7 tokens is smaller than the 8 it protects"),
        ("kv-compress:budget=11,sinks=4", "smaller than the 12 it protects"),
        ("kv-compress:budget=9,window=full", "smaller than the 10 it protects"),
        ("kv-compress:rate=0.5", "rate=0.5 is refused"),
        ("kv-compress:rate=0.25", "to keep 0.25 of the tokens seen write keep=25%"),
        ("kv-compress:rate=25%", "write the kept share of the tokens seen as keep=25%"),
        ("kv-compress:keep=25%,rate=4", "keep=25% and rate=4 both set how much is kept"),
        ("kv-compress:budget=64,keep=25%", "keep=25% and budget=64 both set how much is kept"),
        ("kv-compress:rate=2,budget=64", "both set how much is kept"),
        ("kv-compress:rate=2,floor=4", "floor=4 tokens is smaller than the 8 it protects"),
        ("kv-compress:pool=4", "pool=4 has no middle"),
        ("kv-compress:window=0", "window=0 is refused"),
        ("kv-compress:window=half", "window=half is refused"),
        ("kv-compress:power=3", "power=3 is refused"),
        ("kv-compress:layers=some", "layers=some is refused"),
        ("kv-compress:most=0", "most=0 is refused"),
        ("kv-compress:lambda=1", "has no parameter 'lambda'"),
    ],
)
def test_what_it_refuses(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(text)


def test_two_that_evict_or_two_that_step_are_refused() -> None:
    for text in ("kv-compress+snapkv", "h2o+leankv:high=raw,low=raw"):
        with pytest.raises(CompositionError, match="both define which tokens are kept"):
            parse(text)


def test_what_the_sorter_drops_counts_as_gone() -> None:
    sorter = parse("leankv:high=raw,low=raw,t_high=0.5,t_low=0.2")
    view = replace(plan_view(torch.rand(2, 1, 3, 64), 40), page=torch.tensor([4, 4]))
    tier = sorter.plan(view)
    assert 30 * 6 < int((tier != DROP).sum()) < 40 * 6  # within the budget already
    selector = compose(KVCompress(Budget(40), window=8), sorter).selector
    assert selector is not None
    assert torch.equal(selector.plan(view), tier)


def test_a_sorter_beside_it_says_the_tier_and_it_says_who_goes() -> None:
    policy = compose(KVCompress(Budget(16), window=8), parse("leankv:high=raw,low=raw,t_high=0.3"))
    selector = policy.selector
    assert selector is not None
    view = replace(plan_view(torch.rand(2, 1, 3, 64), 16), page=torch.tensor([4, 4]))
    plan, tier = selector.plan(view), parse("leankv:high=raw,low=raw,t_high=0.3").plan(view)
    assert int((plan != DROP).sum()) <= 16 * 6
    assert bool(((plan == tier) | (plan == DROP)).all())
    assert {0, 1} <= set(plan.unique().tolist())
