"""HeadKV: a part of the budget goes to heads by their scores."""

from math import floor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evict_cases import check_counts, filled, plan_at_random, ragged
from heads_cases import scores_of, written
from kv_evict import HeadKV
from kv_policy import DROP, Budget, parse
from kv_policy.testing import check_policy


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Scores of a model with two layers of three KV heads."""
    return written(tmp_path / "heads", 2, 3)


@given(
    seed=st.integers(0, 999),
    window=st.integers(1, 6),
    more=st.integers(0, 20),
    length=st.integers(8, 60),
    beta=st.sampled_from([1.0, 1.2, 2.0, 10.0]),
    power=st.sampled_from([0.5, 1.0, 3.0]),
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_heads_keep_what_the_formula_gives(
    file: str, seed: int, window: int, more: int, length: int, beta: float, power: float
) -> None:
    policy = HeadKV(file=file, window=window, beta=beta, power=power)
    position = ragged(seed, 2, [length], [0])
    plan, score = plan_at_random(policy, position, [length], [window + more], seed)
    weight = [w**power for w in scores_of(2, 3).scores["induction"].double().flatten().tolist()]
    pool = more / beta * len(weight)
    asked = [w / sum(weight) * pool + more * (1 - 1 / beta) for w in weight]
    counts = [
        (floor(kept - 1e-5) + window, floor(kept + 1e-5) + window)
        for kept in filled(asked, max(length - window, 0))
    ]
    check_counts(plan[:, 0], score[:, 0], position[:, 0], counts)
    assert (plan != DROP).sum() <= (window + more) * 6


def test_the_best_head_keeps_most(file: str) -> None:
    policy = HeadKV(file=file, window=4, beta=1.0)
    plan, _ = plan_at_random(policy, ragged(0, 2, [400], [0]), [400], [44])
    counts = (plan != DROP).sum(-1)[:, 0].flatten()
    assert counts.argmax() == scores_of(2, 3).scores["induction"].argmax()
    even = HeadKV(file=file, window=4, beta=1e6)
    plan, _ = plan_at_random(even, ragged(0, 2, [400], [0]), [400], [44])
    assert set((plan != DROP).sum(-1).flatten().tolist()) <= {43, 44}


@pytest.mark.parametrize("options", [{}, {"budget": "9", "window": "8", "beta": "3.5"}])
def test_the_contract_holds(tmp_path: Path, options: dict[str, str]) -> None:
    file = written(tmp_path / "four", 2, 4)  # those of the shape that it is checked with
    check_policy(HeadKV.from_text({"file": file, **options}))


def test_what_it_says_of_itself(file: str) -> None:
    policy = HeadKV(Budget(64), file=file, window=16)
    assert policy.fitted_to == "0123456789abcdef"
    assert (policy.protected, policy.decode, policy.scope) == (16, "grow", "model")


def test_text_form_and_what_it_refuses(file: str) -> None:
    policy = HeadKV(Budget(64), file=file, beta=2.0)
    assert str(policy) == f"headkv:budget=64,file={file},beta=2.0"
    assert parse(str(policy)) == policy
    for text, message in (
        ("headkv", "headkv needs file=..., which has no default"),
        ("headkv:file=F,beta=0.5", "headkv: beta=0.5 is refused"),
        ("headkv:file=none-there", "headkv: none-there does not exist; write it with"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(text)
