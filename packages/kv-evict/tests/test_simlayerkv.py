"""SimLayerKV: lazy layers keep both ends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import LENGTHS, SHAPE, STORED, plan_view, quick, ragged
from evict_cases import step as stepped
from kv_evict import SimLayerKV
from kv_policy import DROP, LayerView, Observe, parse
from kv_policy.testing import check_policy


def view_of(position: Tensor, mass: Tensor) -> LayerView:
    return LayerView(
        layer=torch.zeros_like(torch.tensor(LENGTHS)),
        shape=SHAPE,
        position=position,
        fresh=position >= torch.tensor(STORED)[:, None, None],
        score=torch.zeros(position.shape),
        length=torch.tensor(LENGTHS),
        mass=mass.masked_fill(position < 0, 0),
        seen=(position >= 0).long(),
    )


@given(
    seed=st.integers(0, 999),
    sinks=st.integers(0, 4),
    recent=st.integers(1, 12),
    threshold=st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0]),
)
@quick
def test_a_layer_is_lazy_if_both_ends_hold_more_than_the_threshold(
    seed: int, sinks: int, recent: int, threshold: float
) -> None:
    policy = SimLayerKV(threshold=threshold, sinks=sinks, recent=recent)
    draw, position = torch.Generator().manual_seed(seed), ragged(seed)[0]
    view = view_of(position, torch.rand(position.shape, generator=draw))
    stats = policy.head_stats(view)
    whole = plan_view(torch.rand(1, *position.shape), position[None], LENGTHS, LENGTHS, stats[None])
    plan = policy.plan(whole)[0]
    assert view.mass is not None
    for b, length in enumerate(LENGTHS):
        inside = total = 0.0
        for h in range(3):
            for p, m in zip(position[b, h].tolist(), view.mass[b, h].tolist(), strict=True):
                total += m if p >= 0 else 0
                inside += m if p >= 0 and (p < sinks or p >= length - recent) else 0
        lazy = inside > threshold * total + 1e-9
        assert stats[b].tolist() == [float(lazy)] * 3
        assert policy.tier_thresholds(whole)[0, 0, b].tolist() == [float(lazy)] * 3
        for h in range(3):
            held = [p for p in position[b, h].tolist() if p >= 0]
            kept = position[b, h][plan[b, h] != DROP].tolist()
            ends = [p for p in held if p < sinks or p >= length - recent]
            assert kept == (ends if lazy else held)


def test_a_step_evicts_the_oldest_of_a_lazy_layer_alone() -> None:
    policy = SimLayerKV(sinks=1, recent=2)
    held = {0: torch.inf, 6: 6.0, 7: 7.0}
    assert stepped(policy, held, 8, 8.0, budget=9, share=1.0) == [0, 7, 8]
    assert stepped(policy, held, 8, 8.0, budget=9, share=0.0) == [0, 6, 7, 8]


@pytest.mark.parametrize(
    "policy",
    [SimLayerKV(), SimLayerKV(threshold=0.3, sinks=0, recent=3), SimLayerKV(threshold=0.0)],
    ids=str,
)
def test_the_contract_holds(policy: SimLayerKV) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = SimLayerKV(recent=64)
    assert policy.observe == Observe(last=1)
    assert policy.budget is None
    assert (policy.protected, policy.decode, policy.scope) == (68, "step", "layer")
    assert not policy.capabilities.splits_heads


def test_text_form_and_what_it_refuses() -> None:
    policy = SimLayerKV(threshold=0.5, sinks=0, recent=64)
    assert str(policy) == "simlayerkv:threshold=0.5,sinks=0,recent=64"
    assert parse(str(policy)) == policy
    for text, message in (
        ("simlayerkv:threshold=2", "threshold=2 is refused"),
        ("simlayerkv:recent=0", "recent=0 is refused"),
        ("simlayerkv:budget=9", "simlayerkv has no parameter 'budget'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(text)
