import pytest
import torch

from kv_policy import FRESH, Budget, CacheShape, LayerView, PlanView, compose, parse
from kv_policy.raw import Raw
from kv_policy.testing import check_policy
from kv_vnorm import Vnorm


@pytest.mark.parametrize(
    "policy", [Vnorm(), Vnorm(Budget(10, "percent"), sinks=4, recent=16), compose(Vnorm(), Raw())]
)
def test_it_keeps_the_contract(policy: Vnorm) -> None:
    check_policy(policy)


def test_large_values_stay() -> None:
    shape = CacheShape(layers=1, kv_heads=2, group=1, key_dim=8, value_dim=8)
    size = torch.tensor([[[3.0, 1, 5, 2, 4, 6], [6, 5, 4, 3, 2, 1]]])
    position = torch.arange(6).expand(1, 2, 6)
    view = LayerView(
        layer=torch.tensor([0]),
        shape=shape,
        position=position,
        fresh=position >= 0,
        score=torch.zeros(1, 2, 6),
        length=torch.tensor([6]),
        values=torch.nn.functional.normalize(torch.randn(1, 2, 6, 8), dim=-1) * size[..., None],
    )
    policy = Vnorm(Budget(3), sinks=0, recent=1)
    plan = policy.plan(
        PlanView(
            shape=shape,
            first_layer=0,
            score=policy.score(view)[None],
            position=position[None],
            tier=torch.full((1, 1, 2, 6), FRESH, dtype=torch.uint8),
            length=view.length,
            budget=torch.tensor([3]),
        )
    )
    assert position[plan[0] == 0].tolist() == [2, 4, 5, 0, 1, 5]


def test_it_is_found_by_name() -> None:
    assert parse("vnorm:budget=64") == Vnorm(Budget(64))
    with pytest.raises(ValueError, match="a budget of 8 tokens is smaller than the 13 it protects"):
        parse("vnorm:budget=8,recent=9")
