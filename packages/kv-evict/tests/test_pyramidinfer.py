from math import cos, floor, pi

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_evict import PyramidInfer, SnapKV
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
    policy: PyramidInfer, position: Tensor, lengths: list[int], budgets: list[int], seed: int
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


def filled(asked: list[float], length: int) -> list[float]:
    """What heads keep of what they are given: beyond the prompt it goes to those that have room."""
    kept = [min(a, length) for a in asked]
    room, excess = length * len(asked) - sum(kept), sum(asked) - sum(kept)
    return [k + (length - k) * min(1, excess / max(room, 1)) for k in kept]


def by_hand(policy: PyramidInfer, layers: int, budget: int, length: int) -> list[tuple[int, int]]:
    """Tokens a head of each layer is to keep; two numbers where rounding decides."""
    last = policy.last_layer
    falls = [cos(pi * n / (layers - 1)) if layers > 1 else 1.0 for n in range(layers)]
    weights = [last + (1 - last) * (1 + fall) / 2 for fall in falls]
    asked = [(budget - policy.window) * weight * layers / sum(weights) for weight in weights]
    parts = filled(asked, max(length - policy.window, 0))
    return [tuple(floor(part + hair) + policy.window for hair in (-1e-5, 1e-5)) for part in parts]


@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 5),
    window=st.integers(1, 6),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    last=st.sampled_from([0.01, 0.2, 0.5, 1.0]),
)
@quick
def test_heads_keep_what_their_layer_is_given(
    seed: int,
    layers: int,
    window: int,
    more: tuple[int, int],
    lengths: tuple[int, int],
    last: float,
) -> None:
    policy = PyramidInfer(window=window, last_layer=last)
    position, budgets = ragged(seed, layers, list(lengths)), [window + m for m in more]
    plan, score = plan_of(policy, position, list(lengths), budgets, seed)
    for b, budget in enumerate(budgets):
        each = by_hand(policy, layers, budget, lengths[b])
        for n, counts in enumerate(each):
            for h in range(3):
                worth = dict(zip(position[n, b, h].tolist(), score[n, b, h].tolist(), strict=True))
                worth.pop(-1, None)
                order = sorted(worth, key=lambda p: (-worth[p], p))
                kept = position[n, b, h][plan[n, b, h] != DROP].tolist()
                assert kept in [sorted(order[:count]) for count in counts]
        assert (plan[:, b] != DROP).sum() <= budget * layers * 3


def test_budgets_fall_slowly_at_both_ends_to_a_part_of_the_first() -> None:
    policy, lengths = PyramidInfer(window=4, last_layer=0.2), [300]
    plan, _ = plan_of(policy, ragged(0, 4, lengths, whole=True), lengths, [62], 0)
    # 58 beside the window, on average, by 1, 0.8, 0.4 and 0.2
    assert (plan != DROP).sum(-1)[:, 0, 0].tolist() == [100, 81, 42, 23]


def test_a_last_layer_like_the_first_makes_all_alike() -> None:
    policy, lengths = PyramidInfer(window=4, last_layer=1.0), [300]
    plan, _ = plan_of(policy, ragged(0, 4, lengths, whole=True), lengths, [64], 0)
    assert (plan != DROP).sum(-1).unique().tolist() == [64]


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
        found = PyramidInfer(window=4, **options).score(view)
        assert torch.equal(found, SnapKV(window=4, **options).score(view))


@pytest.mark.parametrize(
    "policy",
    [
        PyramidInfer(),
        PyramidInfer(Budget(9), window=8, pool=3, last_layer=1.0),
        PyramidInfer(Budget(30, "percent"), window=5, group="max", last_layer=0.01),
    ],
    ids=str,
)
def test_the_contract_holds(policy: PyramidInfer) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = PyramidInfer(Budget(64), window=16, group="max")
    assert policy.observe == Observe(last=16, group="max")
    assert (policy.protected, policy.decode, policy.scope) == (16, "grow", "model")
    assert not policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = PyramidInfer(Budget(50, "percent"), window=16, pool=7, pooling="max", last_layer=0.5)
    assert str(policy) == "pyramidinfer:budget=50%,window=16,pool=7,pooling=max,last_layer=0.5"
    assert parse(str(policy)) == policy
    assert parse("pyramidinfer") == PyramidInfer()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("last_layer=0", "pyramidinfer: last_layer=0 is refused"),
        ("last_layer=1.5", "pyramidinfer: last_layer=1.5 is refused"),
        ("pool=4", "pyramidinfer: pool=4 has no middle; give an odd number, such as 5"),
        ("floor=0.2", "pyramidinfer has no parameter 'floor'; its parameters: budget, window"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"pyramidinfer:{text}")
