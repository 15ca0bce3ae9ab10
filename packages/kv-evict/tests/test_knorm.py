import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import keyed, planned, quick, step
from kv_evict import Knorm
from kv_policy import DROP, Budget, CacheShape, LayerView, Observe, parse
from kv_policy.testing import check_policy


def norm(key: Tensor) -> float:
    """Round to 12 bits, as norms are compared."""
    mantissa, exponent = math.frexp(math.sqrt(sum(x * x for x in key.tolist())))
    return math.ldexp(round(mantissa * 2**12), exponent - 12)


@given(st.integers(0, 999))
@quick
def test_a_score_is_minus_the_norm_of_the_key(seed: int) -> None:
    view = keyed(seed)
    assert view.keys is not None
    found = Knorm().score(view)
    for b, h, i in (view.position >= 0).nonzero().tolist():
        assert found[b, h, i].item() == pytest.approx(-norm(view.keys[b, h, i]))


def test_a_token_that_comes_again_has_its_norm_again() -> None:
    # Rotated by RoPE; its rounding must not decide which of the two is kept.
    key, angle = torch.randn(1, 64, generator=torch.Generator().manual_seed(2)), torch.arange(500)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = key.chunk(2, -1)
    keys = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    assert len(torch.linalg.vector_norm(keys, dim=-1).unique()) > 1
    position = angle[None, None]
    view = LayerView(
        layer=torch.tensor([0]),
        shape=CacheShape(layers=1, kv_heads=1, group=1, key_dim=64, value_dim=4),
        position=position,
        fresh=position >= 0,
        score=torch.zeros(1, 1, 500),
        length=torch.tensor([500]),
        keys=keys[None, None],
    )
    assert len(Knorm().score(view).unique()) == 1


@given(st.integers(0, 999), st.tuples(st.integers(1, 30), st.integers(1, 12)))
@quick
def test_each_head_keeps_its_smallest_keys(seed: int, budget: tuple[int, int]) -> None:
    policy, view = Knorm(), keyed(seed)
    plan = planned(policy, view, budget)
    assert view.keys is not None
    for b in range(2):
        for h in range(3):
            held = [i for i, p in enumerate(view.position[b, h].tolist()) if p >= 0]
            size = {i: norm(view.keys[b, h, i]) for i in held}
            kept = set(sorted(held, key=lambda i: size[i])[: budget[b]])
            assert {i for i, t in enumerate(plan[b, h].tolist()) if t != DROP} == kept


@given(st.integers(0, 999), st.integers(1, 8))
@quick
def test_at_every_moment_the_smallest_keys_so_far_are_kept(seed: int, budget: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(16, 5, generator=draw, dtype=torch.float64)
    scores: dict[int, float] = {}
    held: list[int] = []
    for at in range(16):
        arriving = LayerView(
            layer=torch.tensor([0]),
            shape=CacheShape(layers=1, kv_heads=1, group=1, key_dim=5, value_dim=4),
            position=torch.tensor([[[at]]]),
            fresh=torch.ones(1, 1, 1, dtype=torch.bool),
            score=torch.zeros(1, 1, 1),
            length=torch.tensor([at + 1]),
            generated=True,
            keys=keys[None, None, at : at + 1],
        )
        scores[at] = Knorm().score(arriving).item()
        held = step(Knorm(), {p: scores[p] for p in held}, at, scores[at], budget)
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
    assert policy.recent_tokens(torch.tensor([2])) is None
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
