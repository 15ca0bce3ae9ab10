import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_evict import TOVA
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

SHAPE = CacheShape(layers=1, kv_heads=3, group=2, key_dim=4, value_dim=4)
LENGTHS, STORED = (23, 9), (14, 3)  # of two sequences; STORED came with earlier passes
quick = settings(max_examples=60, deadline=None, derandomize=True)


def ragged(seed: int, mixed: bool) -> LayerView:
    """The heads of a sequence hold the same tokens in the same places, sequences others.

    Mixed, the places are in no order, as they are while tokens are generated.
    """
    draw = torch.Generator().manual_seed(seed)
    position = torch.full((2, 3, 25), -1)
    for b in range(2):
        count = int(torch.randint(1, STORED[b] + 1, (), generator=draw))
        old = torch.randperm(STORED[b], generator=draw)[:count].sort().values
        held = torch.cat([old, torch.arange(STORED[b], LENGTHS[b])])
        position[b, :, : len(held)] = held
    if mixed:
        position = position[..., torch.randperm(25, generator=draw)]
    there = position >= 0
    mass = torch.rand(position.shape, generator=draw, dtype=torch.float64)
    score = torch.rand(position.shape, generator=draw, dtype=torch.float64)
    fresh = position >= torch.tensor(STORED)[:, None, None]
    return LayerView(
        layer=0,
        shape=SHAPE,
        position=position,
        fresh=fresh,
        score=score.masked_fill(fresh | ~there, 0),
        length=torch.tensor(LENGTHS),
        mass=mass.masked_fill(~there, 0),
        seen=there.long(),
        generated=mixed,
    )


@given(st.integers(0, 999), st.booleans())
@quick
def test_a_score_is_what_the_newest_query_gives_on_average_over_all_heads(
    seed: int, mixed: bool
) -> None:
    view = ragged(seed, mixed)
    assert view.mass is not None
    found = TOVA().score(view)
    for b in range(2):
        for i in range(25):
            given = [view.mass[b, h, i].item() for h in range(3)]
            for h in range(3):
                if view.position[b, h, i] >= 0:
                    assert found[b, h, i].item() == pytest.approx(sum(given) / 3)


@given(st.integers(0, 999), st.tuples(st.integers(1, 30), st.integers(1, 12)))
@quick
def test_all_heads_of_a_layer_keep_the_same_tokens(seed: int, budget: tuple[int, int]) -> None:
    policy, view = TOVA(), ragged(seed, mixed=False)
    score = policy.score(view)
    plan = policy.plan(
        PlanView(
            shape=SHAPE,
            first_layer=0,
            score=score.masked_fill(view.position < 0, torch.nan)[None],
            position=view.position[None],
            tier=torch.full_like(view.position[None], FRESH, dtype=torch.uint8),
            length=view.length,
            budget=torch.tensor(budget),
        )
    )[0]
    assert view.mass is not None
    for b in range(2):
        total = dict(zip(view.position[b, 0].tolist(), view.mass[b].sum(0).tolist(), strict=True))
        total.pop(-1, None)
        kept = sorted(sorted(total, key=lambda p: -total[p])[: budget[b]])
        for h in range(3):
            assert view.position[b, h][plan[b, h] != DROP].tolist() == kept


def step(held: dict[int, float], at: int, score: float, budget: int) -> list[int]:
    """One step of one head that holds these positions and scores, carried out."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    answer = TOVA().step(
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
def test_every_query_decides_anew_who_goes(seed: int, budget: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    held: list[int] = []
    for at in range(16):
        looks = torch.rand(at + 1, generator=draw, dtype=torch.float64).tolist()
        after = step({p: looks[p] for p in held}, at, looks[at], budget)
        assert after == sorted(sorted([*held, at], key=lambda p: -looks[p])[:budget])
        held = after


def test_the_newest_token_may_be_the_one_to_go() -> None:
    held = {0: 0.5, 4: 0.2}
    assert step(held, 7, 0.1, budget=2) == [0, 4]
    assert step(held, 7, 0.3, budget=2) == [0, 7]
    assert step(held, 7, 0.1, budget=3) == [0, 4, 7]
    assert TOVA().shielded(torch.tensor([2])) is None


@pytest.mark.parametrize("policy", [TOVA(), TOVA(Budget(3)), TOVA(Budget(30, "percent"))], ids=str)
def test_the_contract_holds(policy: TOVA) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = TOVA(Budget(64))
    assert policy.observe == Observe(last=1, group="mean", generated=True)
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (0, "step", "layer", 1)
    assert not policy.reads
    assert policy.capabilities.shortens
    assert not policy.capabilities.splits_heads


def test_text_form() -> None:
    policy = TOVA(Budget(12.5, "percent"))
    assert str(policy) == "tova:budget=12.5%"
    assert parse(str(policy)) == policy
    assert parse("tova") == TOVA()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tova:budget=0", "budget=0 is refused"),
        ("tova:budget=101%", "budget=101% is refused"),
        ("tova:window=4", "tova has no parameter 'window'; its parameters: budget"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
