"""A policy that raises for the tokens of one request: it ends, and the others are unaffected."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from torch import Tensor

from kv_evict.h2o import H2O
from kv_evict.kv_compress import KVCompress
from kv_policy import Budget, CacheShape, LayerView, PlanView, Step, StepView

if TYPE_CHECKING:
    from paged_engine import Engine

SHAPE = CacheShape(layers=2, kv_heads=2, group=2, key_dim=6, value_dim=5, dtype=torch.float32)
BAD = 37  # number of tokens at which these policies raise


def expect_none(length: Tensor) -> None:
    from paged_engine import Failure

    if bool((length == BAD).any()):
        raise Failure(f"a sequence has {BAD} tokens")


@dataclass(frozen=True)
class ByScore(H2O):
    """Raises when it scores."""

    name: ClassVar[str] = "by-score"
    budget: Budget = Budget(12)

    def score(self, view: LayerView) -> Tensor:
        expect_none(view.length)
        return super().score(view)


@dataclass(frozen=True)
class ByStep(H2O):
    """Raises in a decode step."""

    name: ClassVar[str] = "by-step"
    budget: Budget = Budget(12)

    def step(self, view: StepView) -> Step:
        expect_none(view.length)
        return super().step(view)


@dataclass(frozen=True)
class ByPlan(KVCompress):
    """Raises when it plans, which it repeats every two tokens."""

    name: ClassVar[str] = "by-plan"

    def plan(self, view: PlanView) -> Tensor:
        expect_none(view.length)
        return super().plan(view)


PLANS = ByPlan(rate=2, floor=12, recent=4, window=4, every=2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", [ByScore(), ByStep(), PLANS], ids=lambda p: p.name)
def test_a_request_fails_alone_while_it_generates(
    engine_class: "type[Engine]", policy: ByScore | ByStep | ByPlan, late: bool
) -> None:
    engine = engine_class(policy, SHAPE, 40, late=late)
    for prompt in (20, 33, 40):
        engine.ask(f"r{prompt}", prompt)
    for _ in range(10):
        engine.step(chunk=10**6)
    assert engine.failed == ["r33"]
    assert [a.request_id for a in engine.running] == ["r20", "r40"]
    for each in list(engine.running):
        engine.finish(each)
    engine.check_empty()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", [ByScore(), PLANS], ids=lambda p: p.name)
def test_a_request_fails_alone_in_its_first_step(
    engine_class: "type[Engine]", policy: ByScore | ByPlan, late: bool
) -> None:
    engine = engine_class(policy, SHAPE, 40, late=late)
    for prompt in (20, BAD, 40, BAD):
        engine.ask(f"r{len(engine.waiting)}", prompt)
    for _ in range(6):
        engine.step(chunk=10**6)
    assert sorted(engine.failed) == ["r1", "r3"]
    for each in list(engine.running):
        engine.finish(each)
    engine.check_empty()


def test_what_fails_in_the_host_ends_who_took_part_and_the_engine_goes_on(
    engine_class: "type[Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_class(H2O(Budget(12)), SHAPE, 40)
    asked = [engine.ask(f"r{prompt}", prompt) for prompt in (20, 30)]
    engine.step(chunk=10**6)
    for each in asked:
        each.broken = True
    with monkeypatch.context() as patch:
        patch.setattr("kv_runtime.retain.selected.step", lambda *_: 1 / 0)
        engine.step(chunk=10**6)
    assert sorted(engine.failed) == ["r20", "r30"]
    engine.ask("next", 25)
    for _ in range(3):
        engine.step(chunk=10**6)
    assert engine.running[0].computed == 27
    engine.finish(engine.running[0])
    engine.check_empty()


def test_a_lost_device_is_no_requests_fault(
    engine_class: "type[Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_class(H2O(Budget(12)), SHAPE, 40)
    engine.ask("a", 20)

    def lost(*_: object) -> None:
        raise torch.AcceleratorError("the device is gone")

    monkeypatch.setattr("kv_runtime.retain.selected.score", lost)
    with pytest.raises(torch.AcceleratorError):
        engine.step(chunk=10**6)


def test_a_bad_budget_that_nobody_refused_fails_alone(engine_class: "type[Engine]") -> None:
    engine = engine_class(H2O(Budget(12)), SHAPE, 40)
    engine.ask("good", 20, 16)
    engine.ask("bad", 30, "9e290B").broken = True
    for _ in range(2):
        engine.step(chunk=10**6)
    assert engine.failed == ["bad"]
    engine.finish(engine.running[0])
    engine.check_empty()
