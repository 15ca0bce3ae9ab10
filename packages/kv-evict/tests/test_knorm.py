import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_evict import Knorm
from kv_policy import (
    DROP,
    FRESH,
    NOBODY,
    Budget,
    CacheShape,
    LayerView,
    Observe,
    PlanView,
    StepView,
    parse,
)
from kv_policy.testing import check_policy

SHAPE = CacheShape(layers=1, kv_heads=3, group=2, key_dim=5, value_dim=4)
LENGTHS, STORED = (23, 9), (14, 3)  # of two sequences; STORED came with earlier passes
quick = settings(max_examples=60, deadline=None, derandomize=True)


def ragged(seed: int) -> LayerView:
    """Heads that each hold other tokens of the earlier passes."""
    draw = torch.Generator().manual_seed(seed)
    position = torch.full((2, 3, 25), -1)
    for b in range(2):
        for h in range(3):
            count = int(torch.randint(1, STORED[b] + 1, (), generator=draw))
            old = torch.randperm(STORED[b], generator=draw)[:count].sort().values
            held = torch.cat([old, torch.arange(STORED[b], LENGTHS[b])])
            position[b, h, : len(held)] = held
    keys = torch.randn(*position.shape, 5, generator=draw, dtype=torch.float64)
    fresh = position >= torch.tensor(STORED)[:, None, None]
    return LayerView(
        layer=0,
        shape=SHAPE,
        position=position,
        fresh=fresh,
        score=torch.rand(position.shape, generator=draw, dtype=torch.float64),
        length=torch.tensor(LENGTHS),
        keys=keys.masked_fill(position[..., None] < 0, 0),
    )


def norm(key: Tensor) -> float:
    return math.sqrt(sum(x * x for x in key.tolist()))


@given(st.integers(0, 999))
@quick
def test_a_score_is_minus_the_norm_of_the_key(seed: int) -> None:
    view = ragged(seed)
    assert view.keys is not None
    found = Knorm().score(view)
    for b, h, i in (view.position >= 0).nonzero().tolist():
        assert found[b, h, i].item() == pytest.approx(-norm(view.keys[b, h, i]))


@given(st.integers(0, 999), st.tuples(st.integers(1, 30), st.integers(1, 12)))
@quick
def test_each_head_keeps_its_smallest_keys(seed: int, budget: tuple[int, int]) -> None:
    policy, view = Knorm(), ragged(seed)
    plan = policy.plan(
        PlanView(
            shape=SHAPE,
            first_layer=0,
            score=policy.score(view).masked_fill(view.position < 0, torch.nan)[None],
            position=view.position[None],
            tier=torch.full_like(view.position[None], FRESH, dtype=torch.uint8),
            length=view.length,
            budget=torch.tensor(budget),
        )
    )[0]
    assert view.keys is not None
    for b in range(2):
        for h in range(3):
            held = [i for i, p in enumerate(view.position[b, h].tolist()) if p >= 0]
            size = {i: norm(view.keys[b, h, i]) for i in held}
            kept = set(sorted(held, key=lambda i: size[i])[: budget[b]])
            assert {i for i, t in enumerate(plan[b, h].tolist()) if t != DROP} == kept


def step(held: dict[int, float], at: int, score: float, budget: int) -> list[int]:
    """One step of one head that holds these positions and scores, carried out."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    answer = Knorm().step(
        StepView(
            shape=SHAPE,
            first_layer=0,
            candidate=one * score,
            weakest=one[None] * min(held.values(), default=math.inf),
            count=torch.full((1, 1, 1, 1), len(held)),
            cuts=0 * one[None],
            length=torch.tensor([at + 1]),
            budget=torch.tensor([budget]),
        )
    )
    stay = set(held)
    if answer.victim.item() != NOBODY:
        assert answer.target.item() == DROP
        stay.remove(min(held, key=lambda p: held[p]))
    if answer.candidate.item() != DROP:
        stay.add(at)
    return sorted(stay)


@given(st.integers(0, 999), st.integers(1, 8))
@quick
def test_at_every_moment_the_smallest_keys_so_far_are_kept(seed: int, budget: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(16, 5, generator=draw, dtype=torch.float64)
    scores: dict[int, float] = {}
    held: list[int] = []
    for at in range(16):
        arriving = LayerView(
            layer=0,
            shape=CacheShape(layers=1, kv_heads=1, group=1, key_dim=5, value_dim=4),
            position=torch.tensor([[[at]]]),
            fresh=torch.ones(1, 1, 1, dtype=torch.bool),
            score=torch.zeros(1, 1, 1),
            length=torch.tensor([at + 1]),
            generated=True,
            keys=keys[None, None, at : at + 1],
        )
        scores[at] = Knorm().score(arriving).item()
        held = step({p: scores[p] for p in held}, at, scores[at], budget)
        assert held == sorted(sorted(range(at + 1), key=lambda p: norm(keys[p]))[:budget])


@pytest.mark.parametrize(
    "policy", [Knorm(), Knorm(Budget(3)), Knorm(Budget(30, "percent"))], ids=str
)
def test_the_contract_holds(policy: Knorm) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = Knorm(Budget(64))
    assert policy.reads == {"keys"}
    assert policy.observe == Observe()
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (0, "step", "layer", 1)
    assert policy.shielded(torch.tensor([2])) is None
    assert policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = Knorm(Budget(50, "percent"))
    assert str(policy) == "knorm:budget=50%"
    assert parse(str(policy)) == policy
    assert parse("knorm") == Knorm()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("knorm:budget=0", "budget=0 is refused"),
        ("knorm:budget=many", "budget 'many' is not understood"),
        ("knorm:sinks=4", "knorm has no parameter 'sinks'; its parameters: budget"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
