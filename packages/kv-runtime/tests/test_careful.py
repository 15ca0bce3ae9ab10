"""A selector that fails about one sequence, asked about the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kv_policy import (
    DROP,
    NOBODY,
    CacheShape,
    LayerView,
    Queries,
    Selecting,
    Selector,
    Step,
    StepView,
)
from kv_runtime.retain.careful import Careful

SHAPE = CacheShape(layers=2, kv_heads=2, group=1, key_dim=4, value_dim=3)
BAD = 7
LENGTHS = [5, BAD, 9]


@dataclass(frozen=True)
class Touchy(Selecting):
    """Reads whatever a view has, and fails about a sequence of `BAD` tokens."""

    name: ClassVar[str] = "touchy"

    def score(self, view: LayerView) -> Tensor:
        expect_none(view.length)
        assert view.mass is not None
        assert view.keys is not None
        assert view.queries is not None
        rows = view.also["square"] + view.mass + view.keys.sum(-1)
        asked = view.queries.vectors.sum((2, 3, 4)) + view.queries.position
        return rows + asked[..., None] + view.length[:, None, None]

    def step(self, view: StepView) -> Step:
        expect_none(view.length)
        worst = view.weakest[0] + view.budget[None, :, None]
        victim = torch.where(view.candidate > worst, 0, NOBODY).byte()
        return Step(torch.zeros_like(victim), victim, victim + 1)


def expect_none(length: Tensor) -> None:
    if bool((length == BAD).any()):
        raise ArithmeticError(f"a sequence has {BAD} tokens")


def layers(lengths: list[int]) -> LayerView:
    """A view of two layers."""
    draw = torch.Generator().manual_seed(0)
    rows, heads, tokens = 2 * len(lengths), 2, 6

    def some(*more: int) -> Tensor:
        return torch.randn(rows, heads, *more, generator=draw)

    position = torch.arange(tokens).expand(rows, heads, -1)
    return LayerView(
        layer=torch.tensor([0, 1]).repeat_interleave(len(lengths)),
        shape=SHAPE,
        position=position,
        fresh=position < 1,
        score=some(tokens),
        length=torch.tensor(lengths * 2),
        mass=some(tokens),
        seen=position,
        also={"square": some(tokens)},
        generated=True,
        keys=some(tokens, 4),
        queries=Queries(some(1, 1, 4), torch.arange(rows)[:, None]),
    )


def steps(lengths: list[int]) -> StepView:
    draw = torch.Generator().manual_seed(1)
    lead = 2, len(lengths), 2
    return StepView(
        shape=SHAPE,
        first_layer=0,
        candidate=torch.randn(lead, generator=draw),
        weakest=torch.randn(1, *lead, generator=draw),
        count=torch.ones(1, *lead, dtype=torch.long),
        tier_thresholds=torch.zeros(1, *lead),
        length=torch.tensor(lengths),
        budget=torch.tensor([0, 1, 0][: len(lengths)]),
    )


def test_where_nothing_fails_the_selector_answers() -> None:
    careful, view = Careful(Touchy(), sequences=3), layers([5, 6, 9])
    assert torch.equal(careful.score(view), Touchy().score(view))
    assert careful.errors == {}


def test_others_are_scored_as_they_would_be_and_who_fails_gets_nothing() -> None:
    careful = Careful(Touchy(), sequences=3)
    found, wanted = careful.score(layers(LENGTHS)), Touchy().score(layers([5, 6, 9]))
    for row in range(6):
        alone = torch.zeros_like(wanted[row]) if row % 3 == 1 else wanted[row]
        torch.testing.assert_close(found[row], alone)
    assert [*careful.errors] == [1]
    assert isinstance(careful.errors[1], ArithmeticError)
    assert torch.equal(careful.score(layers(LENGTHS)), found)  # of later layers, say


def test_others_take_their_step_and_who_fails_takes_none() -> None:
    careful = Careful(Touchy(), sequences=3)
    found, wanted = careful.step(steps(LENGTHS)), Touchy().step(steps([5, 6, 9]))
    for mine, right, none in (
        (found.candidate, wanted.candidate, DROP),
        (found.victim, wanted.victim, NOBODY),
        (found.target, wanted.target, DROP),
    ):
        assert torch.equal(mine[:, [0, 2]], right[:, [0, 2]])
        assert mine[:, 1].unique().tolist() == [none]
    assert [*careful.errors] == [1]


@pytest.mark.parametrize(
    "ask", [lambda s: s.score(layers([BAD])), lambda s: s.step(steps([BAD]))], ids=["score", "step"]
)
def test_a_failure_about_the_only_sequence_is_raised(ask: Callable[[Selector], object]) -> None:
    with pytest.raises(ArithmeticError):
        ask(Careful(Touchy()))


def test_it_is_a_selector_with_the_answers_of_another() -> None:
    touchy, careful = Touchy(), Careful(Touchy())
    assert isinstance(careful, Selector)
    for name in ("tiers", "budget", "protected", "observe", "reads", "scope", "decode", "replan"):
        assert getattr(careful, name) == getattr(touchy, name)
    assert careful.running is None
    assert careful.recent_tokens(torch.ones(1, dtype=torch.long)) is None
    assert careful.head_stats(layers([5])) is None
