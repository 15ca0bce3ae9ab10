"""A selector has two methods; all other members are optional, and hosts get defaults."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from kv_policy import (
    DROP,
    Budget,
    CacheShape,
    Capabilities,
    Evictor,
    KVPolicy,
    LayerView,
    Observe,
    Part,
    PlanView,
    Raw,
    Replan,
    Replay,
    RunningSum,
    Selector,
    Step,
    StepView,
    complete,
    compose,
)
from kv_policy.sorted_selector import SortedSelector
from kv_policy.testing import check_policy
from kv_policy.testing.views import decoding_step


class Bare:
    """No base class, and nothing but the two methods."""

    def score(self, view: LayerView) -> Tensor:
        return view.position.float()

    def plan(self, view: PlanView) -> Tensor:
        return torch.where((view.position >= 0) & (view.position % 2 == 0), 0, DROP).byte()


class Steps(Bare):
    def step(self, view: StepView) -> Step:
        drop = torch.full_like(view.candidate, DROP, dtype=torch.uint8)
        return Step(drop, drop, drop)


@dataclass(frozen=True)
class Even(Part):
    """A policy with a bare selector."""

    name: ClassVar[str] = "even"

    @property
    def selector(self) -> Selector:
        return Bare()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(shortens=True, shares_prefixes=False, rolls_back=False)


@dataclass(frozen=True)
class Heavy(Evictor):
    """Has every optional member."""

    name: ClassVar[str] = "heavy"
    budget: Budget = Budget(50)
    sinks = 3
    recent = 2
    decode = "step"
    scope = "model"
    reads = frozenset({"keys"})
    observe = Observe(last=None, skip=1, generated=True)
    replan = Replan(every=7)
    running = RunningSum()
    replay = Replay("Again.", "Go on: ")

    def score(self, view: LayerView) -> Tensor:
        assert view.mass is not None
        return view.score + view.mass

    def head_stats(self, view: LayerView) -> Tensor:
        return view.score.sum(-1)

    def tier_thresholds(self, view: PlanView) -> Tensor:
        return view.score.amax(-1)[None]


def test_a_bare_selector_has_an_answer_to_every_question() -> None:
    bare = Bare()
    assert isinstance(bare, Selector)
    whole = complete(bare)
    assert isinstance(whole, Selector)
    assert complete(whole) is whole
    assert (whole.tiers, whole.budget, whole.protected) == (1, None, 0)
    assert (whole.observe, whole.reads, whole.scope) == (Observe(), frozenset(), "layer")
    assert (whole.decode, whole.replan, whole.running) == ("grow", Replan(), None)
    assert whole.replay is None
    assert whole.recent_tokens(torch.tensor([5])) is None


def test_own_answers_go_before_the_defaults() -> None:
    heavy = Heavy()
    whole = complete(heavy)
    for name in (
        *("tiers", "budget", "protected", "observe", "reads", "scope", "decode", "replan"),
        *("running", "replay"),
    ):
        assert getattr(whole, name) == getattr(heavy, name)
    recent_tokens = whole.recent_tokens(torch.tensor([5, 9]))
    assert recent_tokens is not None
    assert recent_tokens.tolist() == [2, 2]


def test_who_has_a_step_and_does_not_say_when_steps() -> None:
    assert complete(Steps()).decode == "step"

    class Grows(Steps):
        decode: Literal["grow", "step"] = "grow"

    assert complete(Grows()).decode == "grow"


def test_a_step_that_is_missing_is_missed_at_once() -> None:
    class Stepless(Bare):
        decode: Literal["grow", "step"] = "step"

    with pytest.raises(TypeError, match="Stepless has decode='step' but no step"):
        complete(Stepless())


class Once(Bare):
    scores_once = True


class Looks(Once):
    observe = Observe(last=4)

    def adjust(self, view: LayerView) -> Tensor:
        assert view.mass is not None
        return view.score + view.mass


def test_attention_adjusts_only_what_is_scored_once() -> None:
    assert complete(Once()).adjust is None
    assert complete(Looks()).adjust is not None

    class Blind(Looks):
        observe = Observe()

    assert complete(Blind()).adjust is None  # there is no attention to adjust by

    class Often(Looks):
        scores_once = False

    with pytest.raises(TypeError, match=r"Often has adjust\(view\), but scores_once is False"):
        complete(Often())

    class Idle(Once):
        observe = Observe(last=4)

    with pytest.raises(TypeError, match="Idle has scores_once=True and observes attention"):
        complete(Idle())

    class Chunked(Looks):
        plans_chunks = True

    with pytest.raises(TypeError, match=r"Chunked has plans_chunks=True and adjust\(view\)"):
        complete(Chunked())

    class Later(Looks):
        observe = Observe(last=4, generated=True)

    with pytest.raises(TypeError, match="Later has scores_once=True and observes generated"):
        complete(Later())


class Last(Bare):
    observe = Observe(last=4)
    scores_last = True


def test_only_what_goes_by_the_last_queries_is_scored_at_the_end_of_a_prompt() -> None:
    assert complete(Last()).scores_last
    assert not complete(Bare()).scores_last

    class Every(Last):
        observe = Observe(last=None)

    class Blind(Last):
        observe = Observe()

    class Once(Last):
        scores_once = True

        def adjust(self, view: LayerView) -> Tensor:
            return view.score

    class Chunked(Last):
        plans_chunks = True

    for broken, why in (
        (Every, "observes all queries of a prompt"),
        (Blind, "observes no query of a prompt"),
        (Once, "scores_once=True"),
        (Chunked, "plans_chunks=True"),
    ):
        with pytest.raises(TypeError, match=f"{broken.__name__} has scores_last=True and {why}"):
            complete(broken())


class Again(Bare):
    reads = frozenset({"keys"})

    def rescore(self, view: LayerView) -> Tensor:
        assert view.keys is not None
        return view.score + view.keys.sum(-1)


def test_a_plan_goes_by_stored_scores_unless_they_are_computed_again() -> None:
    assert complete(Bare()).rescore is None
    again = complete(Again())
    assert again.rescore is not None
    evictor = Again()
    assert complete(SortedSelector(evictor, Bare())).rescore == evictor.rescore
    assert complete(SortedSelector(Bare(), Again())).rescore is None  # the sorter sorts by stored


class Least(Bare):
    """Keeps tokens of positive score, in the second tier if above one."""

    tiers = 2

    def plan(self, view: PlanView) -> Tensor:
        kept = (view.position >= 0) & (view.score > 0)
        return torch.where(kept, (view.score > 1).byte(), DROP)

    def tier_thresholds(self, view: PlanView) -> Tensor:
        return view.score.amax(-1)[None]


def test_a_sorter_goes_by_stored_scores_and_the_evictor_by_those_of_the_plan() -> None:
    class Evicts(Again):
        def plan(self, view: PlanView) -> Tensor:
            return torch.where(view.score > 5, view.tier, DROP)

    stored = torch.tensor([[[[0.5, 2.0, 3.0, -1.0]]]])
    view = PlanView(
        shape=view_of(4).shape,
        first_layer=0,
        score=torch.tensor([[[[9.0, 9.0, 0.0, 9.0]]]]),
        position=torch.arange(4)[None, None, None],
        tier=torch.full((1, 1, 1, 4), 254, dtype=torch.uint8),
        length=torch.tensor([4]),
        budget=torch.tensor([4]),
        stored_score=stored,
    )
    both = SortedSelector(Evicts(), Least())
    assert both.plan(view).flatten().tolist() == [0, 1, DROP, DROP]
    thresholds = both.tier_thresholds(view)
    assert thresholds is not None
    assert thresholds.flatten().tolist() == [3.0]


@pytest.mark.parametrize("policy", [Even(), compose(Even(), Raw()), Heavy()], ids=str)
def test_the_contract_holds_with_and_without(policy: KVPolicy) -> None:
    check_policy(policy)


def test_who_has_no_step_cannot_be_asked_for_one() -> None:
    bare = complete(Bare())
    view = decoding_step(bare, view_of(3).shape, seed=0)
    with pytest.raises(TypeError, match="the selector has no step"):
        bare.step(view)


def view_of(length: int) -> LayerView:
    position = torch.arange(length).expand(1, 2, length)
    return LayerView(
        layer=torch.tensor([0]),
        shape=CacheShape(layers=1, kv_heads=2, group=1, key_dim=4, value_dim=4),
        position=position,
        fresh=position >= 0,
        score=torch.zeros(1, 2, length),
        length=torch.tensor([length]),
    )


def plan_of(policy: Evictor, score: Tensor, view: LayerView, budget: int) -> Tensor:
    return policy.plan(
        PlanView(
            shape=view.shape,
            first_layer=0,
            score=score[None],
            position=view.position[None],
            tier=torch.full((1, *view.position.shape), 254, dtype=torch.uint8),
            length=view.length,
            budget=torch.tensor([budget]),
        )
    )[0]


@dataclass(frozen=True)
class Ends(Evictor):
    name: ClassVar[str] = "ends"
    sinks: int = 2
    recent: int = 3

    def score(self, view: LayerView) -> Tensor:
        return self.protect(torch.zeros_like(view.score), view)


def test_what_is_protected_follows_from_sinks_and_recent() -> None:
    view = view_of(9)
    assert Ends().protected == 5
    assert Ends().score(view)[0, 0].isinf().nonzero().flatten().tolist() == [0, 1, 6, 7, 8]
    with pytest.raises(ValueError, match="a budget of 4 tokens is smaller than the 5 it protects"):
        Ends(Budget(4))
    for wrong in ({"sinks": -1}, {"recent": -2}):
        with pytest.raises(ValueError, match="count protected tokens; use 0 or more"):
            Ends(Budget(9), **wrong)


def test_a_plan_keeps_both_ends_though_the_score_forgot_them() -> None:
    view = view_of(9)
    score = -(view.position.float() - 4).abs()  # highest in the middle
    plan = plan_of(Ends(), score, view, 6)
    assert view.position[plan == 0].tolist() == [0, 1, 4, 6, 7, 8] * 2


@dataclass(frozen=True)
class Shared(Evictor):
    name: ClassVar[str] = "shared"
    recent: float = 0.5

    def score(self, view: LayerView) -> Tensor:
        return self.protect(-view.position.float(), view)


def test_a_share_of_the_budget_stays_of_the_newest() -> None:
    view = view_of(9)
    assert Shared().protected == 0
    plan = plan_of(Shared(), Shared().score(view), view, 4)
    assert view.position[plan == 0].tolist() == [0, 1, 7, 8] * 2
    with pytest.raises(ValueError, match=r"recent=16.0 is not a share of the budget"):
        Shared(recent=16.0)


def test_under_steps_the_newest_are_shielded_and_get_no_infinite_score() -> None:
    class Stepping(Ends):
        decode = "step"

    assert Stepping().score(view_of(9))[0, 0].isinf().nonzero().flatten().tolist() == [0, 1]
    recent_tokens = Stepping().recent_tokens(torch.tensor([9]))
    assert recent_tokens is not None
    assert recent_tokens.tolist() == [3]


@pytest.mark.parametrize(
    ("members", "wanted"),
    [
        ({}, True),  # nothing of it is called
        ({"scores_once": True}, False),
        ({"observe": Observe(last=4)}, True),
        ({"observe": Observe(last=4, generated=True)}, False),
        ({"decode": "step", "step": lambda self, view: None}, False),
        ({"scores_once": True, "decodes_on_device": True}, True),
    ],
)
def test_a_selector_decodes_on_the_device_if_it_says_so_or_is_not_called(
    members: dict[str, object], wanted: bool
) -> None:
    assert complete(type("Made", (Bare,), members)()).decodes_on_device is wanted
