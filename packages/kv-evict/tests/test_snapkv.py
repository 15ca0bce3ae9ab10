import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from evict_cases import planned
from kv_evict import SnapKV
from kv_policy import DROP, Budget, CacheShape, LayerView, Observe, parse
from kv_policy.testing import check_policy

quick = settings(max_examples=80, deadline=None, derandomize=True)


def shape(heads: int) -> CacheShape:
    return CacheShape(layers=1, kv_heads=heads, group=3, key_dim=4, value_dim=4)


def view_of(
    position: torch.Tensor,
    length: torch.Tensor,
    mass: torch.Tensor | None,
    seen: torch.Tensor | None,
    score: torch.Tensor | None = None,
    fresh: torch.Tensor | None = None,
) -> LayerView:
    return LayerView(
        layer=torch.zeros_like(length),
        shape=shape(position.shape[1]),
        position=position,
        fresh=torch.zeros_like(position, dtype=torch.bool) if fresh is None else fresh,
        score=torch.zeros(position.shape, dtype=torch.float64) if score is None else score,
        length=length,
        mass=mass,
        seen=seen,
    )


@st.composite
def views(draw: st.DrawFn, window: int):
    """Ragged heads with gaps; passes of any number of queries; garbage in empty slots."""
    heads, places = draw(st.integers(1, 3)), 24
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    queries = [draw(st.integers(0, n)) for n in lengths]
    draws = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    lead = (len(lengths), heads, places)
    position = torch.full(lead, -1)
    for b, length in enumerate(lengths):
        for h in range(heads):
            count = int(torch.randint(1, min(places, length) + 1, (), generator=draws))
            held = torch.randperm(length, generator=draws)[:count].sort().values
            position[b, h, :count] = held
    there = position >= 0
    length, counted = torch.tensor(lengths), torch.tensor(queries)[:, None, None]
    newest = length[:, None, None]
    first = newest - counted.clamp(max=window)
    seen = (newest - torch.maximum(first, position)).clamp(min=0).masked_fill(~there, 0)
    mass = torch.rand(lead, generator=draws, dtype=torch.float64) * seen
    score = torch.rand(lead, generator=draws, dtype=torch.float64)
    score[torch.rand(lead, generator=draws) < 0.3] = 0
    score[torch.rand(lead, generator=draws) < 0.2] = torch.inf
    fresh = there & (position >= newest - counted)
    score = score.masked_fill(fresh, 0)
    return view_of(position, length, mass.masked_fill(~there, 1e9), seen, score, fresh)


def oracle(policy: SnapKV, view: LayerView) -> list[list[list[float]]]:
    """The scores of SnapKV, one token at a time."""
    assert view.mass is not None
    assert view.seen is not None
    result = []
    for b, length in enumerate(view.length.tolist()):
        result.append([])
        for h in range(view.position.shape[1]):
            positions = view.position[b, h].tolist()
            means = {
                p: view.mass[b, h, i].item() / max(view.seen[b, h, i].item(), 1)
                for i, p in enumerate(positions)
                if 0 <= p < length - policy.window
            }
            scores = []
            for i, p in enumerate(positions):
                old = view.score[b, h, i].item()
                old = old if math.isfinite(old) else 0.0
                if p < 0:
                    scores.append(None)
                elif p >= length - policy.window:
                    scores.append(math.inf)
                else:
                    around = [m for q, m in means.items() if abs(p - q) <= policy.pool // 2]
                    new = max(around) if policy.pooling == "max" else sum(around) / len(around)
                    part = min(view.seen[b, h, i].item() / policy.window, 1.0)
                    scores.append(new if old == 0 else part * new + (1 - part) * old)
            result[-1].append(scores)
    return result


@given(st.data(), st.integers(1, 9), st.sampled_from([1, 3, 5, 21, 99]), st.booleans())
@quick
def test_scores_are_those_of_the_oracle(data, window, pool, highest):
    policy = SnapKV(window=window, pool=pool, pooling="max" if highest else "avg")
    view = data.draw(views(window))
    found = policy.score(view)
    for b, heads in enumerate(oracle(policy, view)):
        for h, scores in enumerate(heads):
            for i, expected in enumerate(scores):
                if expected is not None:
                    assert found[b, h, i].item() == pytest.approx(expected, rel=1e-12)


def prompt(
    policy: SnapKV, tokens: int, heads: int = 2, group: int = 3
) -> tuple[LayerView, torch.Tensor]:
    """A whole prompt of one sequence, and the window's attention to it from real queries."""
    last = min(policy.window, tokens)
    q = torch.randn(heads, group, last, 8, dtype=torch.float64)
    k = torch.randn(heads, tokens, 8, dtype=torch.float64) * 2
    logits = torch.einsum("hgqd,hkd->hgqk", q, k) / 8**0.5
    ahead = torch.arange(tokens) > torch.arange(tokens - last, tokens)[:, None]
    attention = logits.masked_fill(ahead, -torch.inf).softmax(-1)
    together = {"mean": attention.mean(1), "sum": attention.sum(1), "max": attention.amax(1)}
    mass = together[policy.group].sum(1)[None]
    seen = (~ahead).sum(0).expand_as(mass)
    position = torch.arange(tokens).expand_as(mass)
    view = view_of(
        position, torch.tensor([tokens]), mass, seen, fresh=torch.ones_like(position, dtype=bool)
    )
    return view, attention


def kept(policy: SnapKV, view: LayerView) -> list[list[int]]:
    plan = planned(policy, view, [int(policy.budget.amount)])
    return [view.position[0, h][plan[0, h] != DROP].tolist() for h in range(plan.shape[1])]


@pytest.mark.parametrize("group", ["mean", "sum", "max"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("pool", [1, 5, 21])
def test_a_prompt_keeps_what_the_paper_keeps(group, pooling, pool):
    policy = SnapKV(Budget(20), window=8, pool=pool, pooling=pooling, group=group)
    view, attention = prompt(policy, 60)
    before = attention[..., :52].sum(2)
    mass = {"mean": before.mean(1), "sum": before.sum(1), "max": attention[..., :52].amax(1).sum(1)}
    if pooling == "avg":
        pooled = functional.avg_pool1d(mass[group], pool, 1, pool // 2, count_include_pad=False)
    else:
        pooled = functional.max_pool1d(mass[group], pool, 1, pool // 2)
    order = pooled.argsort(dim=-1, descending=True, stable=True)  # the earlier of ties
    for head, expected in zip(kept(policy, view), order[:, :12].tolist(), strict=True):
        assert head == [*sorted(expected), *range(52, 60)]


@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 20])
def test_a_prompt_shorter_than_window_or_budget_is_kept_whole(tokens):
    policy = SnapKV(Budget(20), window=8)
    view, _ = prompt(policy, tokens)
    assert kept(policy, view) == [list(range(tokens))] * 2


@given(st.integers(1, 8), st.integers(0, 12), st.integers(1, 60))
@quick
def test_the_budget_includes_the_window(window, more, tokens):
    policy = SnapKV(Budget(window + more), window=window, pool=3)
    view, _ = prompt(policy, tokens)
    for head in kept(policy, view):
        assert len(head) == min(tokens, window + more)
        assert set(range(max(tokens - window, 0), tokens)) <= set(head)


def test_the_window_lends_its_neighbours_nothing():
    policy = SnapKV(window=4, pool=5)
    view, _ = prompt(policy, 20)
    assert view.mass is not None
    louder = view.mass.clone()
    louder[..., -4:] *= 1e6
    assert torch.equal(
        policy.score(view), policy.score(view_of(view.position, view.length, louder, view.seen))
    )


def test_places_without_a_token_give_nothing():
    policy = SnapKV(window=2, pool=5)
    position = torch.tensor([[[0, 1, 2, 3, 4, 5], [0, 1, 4, 5, -1, -1]]])
    mass = torch.tensor([[[2.0, 4, 6, 8, 0, 0], [2.0, 4, 0, 0, torch.nan, 1e9]]])
    seen = torch.tensor([[[2, 2, 2, 2, 2, 1], [2, 2, 2, 1, 0, 0]]])
    score = policy.score(view_of(position, torch.tensor([6]), mass.double(), seen))
    assert score[0, 0, :4].tolist() == [2, 2.5, 2.5, 3]
    assert score[0, 1, :2].tolist() == [1.5, 1.5]


def test_a_short_pass_weighs_as_much_as_the_part_of_the_window_it_saw():
    policy = SnapKV(window=4, pool=1)
    position = torch.tensor([[[0, 1, 2, 3, 4, 5, 6, 7]]])
    old = torch.tensor([[[0.8, 0.4, torch.inf, 0.0, torch.inf, torch.inf, torch.inf, 0.0]]])
    mass = torch.tensor([[[0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.0, 0.0]]]).double()
    seen = torch.ones_like(position)  # one query, at position 7
    score = policy.score(view_of(position, torch.tensor([8]), mass, seen, old.double()))
    # a quarter new and three quarters old; 2 was protected until now and 3 has no old score
    assert score[0, 0].tolist() == pytest.approx([0.65, 0.35, 0.2, 0.2, *[math.inf] * 4])


def test_a_pass_as_long_as_the_window_forgets_what_was_before():
    policy = SnapKV(window=4, pool=1)
    position = torch.arange(12)[None, None]
    seen = (12 - position).clamp(max=4)
    mass = torch.rand(1, 1, 12).double() * seen
    old = torch.rand(1, 1, 12).double()
    plain = policy.score(view_of(position, torch.tensor([12]), mass, seen))
    carried = policy.score(view_of(position, torch.tensor([12]), mass, seen, old))
    assert torch.equal(carried, plain)


def test_a_sequence_without_a_query_keeps_its_scores():
    policy = SnapKV(window=2, pool=3)
    position = torch.tensor([[[0, 5, 8, 9]]])
    old = torch.tensor([[[0.5, 0.25, torch.inf, torch.inf]]]).double()
    nothing = torch.zeros(1, 1, 4)
    view = view_of(position, torch.tensor([10]), nothing.double(), nothing.long(), old)
    assert policy.score(view).tolist() == old.tolist()


def test_an_arriving_token_that_nothing_was_observed_for_is_protected():
    view = view_of(torch.tensor([[[41]]]), torch.tensor([42]), None, None)
    assert SnapKV().score(view).tolist() == [[[math.inf]]]


def test_scores_keep_the_dtype_of_the_view():
    view, _ = prompt(SnapKV(window=4), 20)
    assert SnapKV(window=4).score(view).dtype == torch.float64
    half = view_of(
        view.position, view.length, view.mass.bfloat16(), view.seen, torch.zeros(1, 2, 20)
    )
    assert SnapKV(window=4).score(half).dtype == torch.float32


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(),
        SnapKV(pooling="max", group="max"),
        SnapKV(Budget(8), window=8, pool=1, group="sum"),
        SnapKV(Budget(30, "percent"), window=5),
    ],
)
def test_the_contract_holds(policy):
    check_policy(policy)


def test_what_it_says_of_itself():
    policy = SnapKV(Budget(64), window=16, group="max")
    assert policy.observe == Observe(last=16, group="max", power=1, skip=0, generated=False)
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (16, "grow", "layer", 1)
    assert not policy.reads
    assert policy.capabilities.shortens
    assert not policy.capabilities.shares_prefixes
    assert policy.capabilities.splits_heads
    assert "Li et al." in policy.source


def test_text_form():
    assert parse("snapkv") == SnapKV()
    text = "snapkv:budget=50%,window=16,pool=7,pooling=max,group=sum"
    policy = SnapKV(Budget(50, "percent"), window=16, pool=7, pooling="max", group="sum")
    assert str(policy) == text
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkv:budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("snapkv:window=0", "snapkv: window=0 is refused"),
        ("snapkv:pool=4", "snapkv: pool=4 has no middle; use an odd number, such as 5"),
        ("snapkv:pool=-3", "snapkv: pool=-3 is refused"),
        ("snapkv:pooling=min", "snapkv: pooling=min is refused"),
        ("snapkv:group=all", "snapkv: group=all is refused"),
        ("snapkv+streaming", "both define which tokens are kept"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)
