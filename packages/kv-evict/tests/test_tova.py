import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import LENGTHS, SHAPE, STORED, best, planned, quick, ragged, step, worth
from kv_evict import TOVA
from kv_policy import DROP, Budget, LayerView, Observe, parse
from kv_policy.testing import check_policy


def alike(seed: int, mixed: bool) -> LayerView:
    """Heads of a sequence that hold the same tokens in the same slots; sequences differ.

    If mixed, the slots are unordered, as during generation.
    """
    draw = torch.Generator().manual_seed(seed)
    position = ragged(seed, least=1)[0, :, :1].expand(-1, 3, -1)
    if mixed:
        position = position[..., torch.randperm(position.shape[-1], generator=draw)]
    there = position >= 0
    mass = torch.rand(position.shape, generator=draw, dtype=torch.float64)
    score = torch.rand(position.shape, generator=draw, dtype=torch.float64)
    fresh = position >= torch.tensor(STORED)[:, None, None]
    return LayerView(
        layer=torch.zeros_like(torch.tensor(LENGTHS)),
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
    view = alike(seed, mixed)
    assert view.mass is not None
    found = TOVA().score(view)
    for b in range(2):
        for i in range(view.position.shape[-1]):
            given = [view.mass[b, h, i].item() for h in range(3)]
            for h in range(3):
                if view.position[b, h, i] >= 0:
                    assert found[b, h, i].item() == pytest.approx(sum(given) / 3)


@given(st.integers(0, 999), st.tuples(st.integers(1, 30), st.integers(1, 12)))
@quick
def test_all_heads_of_a_layer_keep_the_same_tokens(seed: int, budget: tuple[int, int]) -> None:
    policy, view = TOVA(), alike(seed, mixed=False)
    plan = planned(policy, view, budget)
    assert view.mass is not None
    for b in range(2):
        kept = best(worth(view.position[b, 0], view.mass[b].sum(0)), budget[b])
        for h in range(3):
            assert view.position[b, h][plan[b, h] != DROP].tolist() == kept


@given(st.integers(0, 999), st.integers(1, 8))
@quick
def test_every_query_decides_anew_who_goes(seed: int, budget: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    held: list[int] = []
    for at in range(16):
        looks = torch.rand(at + 1, generator=draw, dtype=torch.float64).tolist()
        after = step(TOVA(), {p: looks[p] for p in held}, at, looks[at], budget)
        assert after == sorted(sorted([*held, at], key=lambda p: -looks[p])[:budget])
        held = after


def test_the_newest_token_may_be_the_one_to_go() -> None:
    held = {0: 0.5, 4: 0.2}
    assert step(TOVA(), held, 7, 0.1, budget=2) == [0, 4]
    assert step(TOVA(), held, 7, 0.3, budget=2) == [0, 7]
    assert step(TOVA(), held, 7, 0.1, budget=3) == [0, 4, 7]
    assert TOVA().recent_tokens(torch.tensor([2])) is None


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
