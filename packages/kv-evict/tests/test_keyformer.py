import pytest
import torch

from evict_cases import plan_view
from kv_evict import Keyformer
from kv_policy import Budget, CacheShape, LayerView, Observe, parse
from kv_policy.testing import check_policy

SHAPE = CacheShape(layers=1, kv_heads=2, group=3, key_dim=4, value_dim=4)


@pytest.mark.parametrize(
    "policy", [Keyformer(), Keyformer(Budget(30, "percent"), tau=2.0, recent=1.0)], ids=str
)
def test_the_contract_holds(policy: Keyformer) -> None:
    check_policy(policy)


def test_it_watches_every_query_under_noise_and_adds_up() -> None:
    policy = Keyformer(tau=1.5)
    assert policy.observe == Observe(last=None, generated=True, gumbel=1.5)
    assert policy.decode == "step"
    mass = torch.rand(3, 1, 2, 9, dtype=torch.float64)  # of three passes over the same tokens
    score = torch.zeros(1, 2, 9, dtype=torch.float64)
    position = torch.arange(9).expand(1, 2, 9)
    for each in mass:
        score = policy.score(
            LayerView(
                layer=torch.tensor([0]),
                shape=SHAPE,
                position=position,
                fresh=position < 0,
                score=score,
                length=torch.tensor([9]),
                mass=each,
                seen=torch.ones_like(position),
            )
        )
    for h in range(2):
        for i in range(9):
            assert score[0, h, i].item() == pytest.approx(sum(mass[:, 0, h, i].tolist()))


def test_the_newest_three_tenths_stay_and_the_best_of_the_others() -> None:
    score = torch.tensor([9.0, 1, 8, 2, 7, 3, 0, 0, 0, 0]).expand(1, 1, 2, 10)
    view = plan_view(score, torch.arange(10).expand(1, 1, 2, 10), [10], [5])
    plan = Keyformer().plan(view)  # 30 % of 5 is 1, rounded down
    assert (plan[0, 0, 0] == 0).nonzero().flatten().tolist() == [0, 2, 4, 5, 9]
    assert Keyformer().recent_tokens(torch.tensor([5, 10, 100])).tolist() == [1, 3, 30]


def test_text_form_and_what_it_refuses() -> None:
    assert parse(str(Keyformer(Budget(9), tau=0.5))) == Keyformer(Budget(9), tau=0.5)
    for text, sentence in (("tau=0", "tau=0 is refused"), ("recent=2", "recent=2 is refused")):
        with pytest.raises(ValueError, match=sentence):
            parse(f"keyformer:{text}")
