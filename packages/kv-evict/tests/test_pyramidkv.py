from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_evict import PyramidKV, SnapKV
from kv_policy import DROP, FRESH, Budget, CacheShape, LayerView, Observe, PlanView, parse
from kv_policy.testing import check_policy

quick = settings(max_examples=60, deadline=None, derandomize=True)


def ragged(seed: int, layers: int, lengths: list[int], whole: bool = False) -> Tensor:
    """Positions [N B H L]: each head holds other old tokens (all if `whole`), and the newest 5."""
    draw = torch.Generator().manual_seed(seed)
    position = torch.full((layers, len(lengths), 3, max(lengths) + 2), -1)
    for n in range(layers):
        for b, length in enumerate(lengths):
            for h in range(3):
                old = max(length - 5, 0)
                count = old if whole else int(torch.randint(0, old + 1, (), generator=draw))
                some = torch.randperm(old, generator=draw)[:count].sort().values
                held = torch.cat([some, torch.arange(old, length)])
                position[n, b, h, : len(held)] = held
    return position


def plan_of(
    policy: PyramidKV, position: Tensor, lengths: list[int], budgets: list[int], seed: int
) -> tuple[Tensor, Tensor]:
    """The plan, and the scores it was made from; the window's are infinite."""
    draw = torch.Generator().manual_seed(seed)
    score = torch.rand(position.shape, generator=draw)
    newest = torch.tensor(lengths)[:, None, None] - policy.window
    score = score.masked_fill(position >= newest, torch.inf)
    view = PlanView(
        shape=CacheShape(len(position), position.shape[2], group=2, key_dim=4, value_dim=4),
        first_layer=0,
        score=score.masked_fill(position < 0, torch.nan),
        position=position,
        tier=torch.full_like(position, FRESH, dtype=torch.uint8),
        length=torch.tensor(lengths),
        budget=torch.tensor(budgets),
    )
    return policy.plan(view), score


def by_hand(
    policy: PyramidKV, layer: int, layers: int, length: int, budget: int
) -> tuple[int, int]:
    """Tokens a head of the layer is to keep; two numbers where rounding decides."""
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
    position, budgets = ragged(seed, layers, list(lengths)), [window + m for m in more]
    plan, score = plan_of(policy, position, list(lengths), budgets, seed)
    for b, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        for n in range(layers):
            counts = by_hand(policy, n, layers, length, budget)
            for h in range(3):
                worth = dict(zip(position[n, b, h].tolist(), score[n, b, h].tolist(), strict=True))
                worth.pop(-1, None)
                order = sorted(worth, key=lambda p: (-worth[p], p))
                kept = position[n, b, h][plan[n, b, h] != DROP].tolist()
                assert kept in [sorted(order[:count]) for count in counts]
        assert (plan[:, b] != DROP).sum() <= budget * layers * 3


def test_the_first_layer_keeps_most_and_the_last_a_part_of_the_average() -> None:
    policy, lengths = PyramidKV(window=4, beta=4.0), [300]
    plan, _ = plan_of(policy, ragged(0, 4, lengths, whole=True), lengths, [44], 0)
    # 40 beside the window: from 70 to 10 by 20
    assert (plan != DROP).sum(-1)[:, 0, 0].tolist() == [74, 54, 34, 14]
    flat, _ = plan_of(
        PyramidKV(window=4, beta=1.0), ragged(0, 4, lengths, whole=True), lengths, [44], 0
    )
    assert (flat != DROP).sum(-1).unique().tolist() == [44]


def test_in_a_short_prompt_the_pyramid_is_flatter() -> None:
    policy, lengths = PyramidKV(window=4, beta=4.0), [64]
    plan, _ = plan_of(policy, ragged(0, 3, lengths, whole=True), lengths, [44], 0)
    # the first layer has no more than 60 beside its window, so the last keeps 20
    assert (plan != DROP).sum(-1)[:, 0, 0].tolist() == [64, 44, 24]


@pytest.mark.parametrize("tokens", [1, 3, 20, 44])
def test_a_prompt_that_fits_the_budget_is_kept_whole(tokens: int) -> None:
    position = ragged(0, 3, [tokens], whole=True)
    plan, _ = plan_of(PyramidKV(window=4), position, [tokens], [44], 0)
    assert torch.equal(plan != DROP, position >= 0)


def test_scores_are_those_of_snapkv() -> None:
    draw = torch.Generator().manual_seed(0)
    position = ragged(1, 1, [30, 11])[0]
    seen = (torch.tensor([30, 11])[:, None, None] - position).clamp(max=4)
    view = LayerView(
        layer=0,
        shape=CacheShape(layers=1, kv_heads=3, group=2, key_dim=4, value_dim=4),
        position=position,
        fresh=position >= 6,
        score=torch.rand(position.shape, generator=draw).masked_fill(position >= 6, 0),
        length=torch.tensor([30, 11]),
        mass=torch.rand(position.shape, generator=draw).masked_fill(position < 0, 0),
        seen=seen.masked_fill(position < 0, 0),
    )
    for options in ({"pool": 3}, {"pool": 5, "pooling": "max"}):
        found = PyramidKV(window=4, **options).score(view)
        assert torch.equal(found, SnapKV(window=4, **options).score(view))


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
        ("pool=4", "pyramidkv: pool=4 has no middle; give an odd number, such as 5"),
        ("floor=0.2", "pyramidkv has no parameter 'floor'; its parameters: budget, window"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"pyramidkv:{text}")
