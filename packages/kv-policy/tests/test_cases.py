"""Cases that the contract must express, each as a policy defined here."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import pytest
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional as F

from kv_policy import (
    DROP,
    FRESH,
    NOBODY,
    Budget,
    CacheShape,
    Capabilities,
    Evictor,
    Formats,
    LayerView,
    Observe,
    PageLayout,
    Part,
    PlanView,
    Raw,
    RawCodec,
    Step,
    StepView,
    TokenFormat,
    best,
    compose,
    protect,
)
from kv_policy.testing import check_policy

SHAPE = CacheShape(layers=3, kv_heads=2, group=2, key_dim=4, value_dim=4)


@dataclass(frozen=True)
class Attended(Evictor):
    """A method per layer: SnapKV's idea in a few lines (Li et al., 2024)."""

    name: ClassVar[str] = "attended"
    window: Annotated[int, Meta(ge=1)] = 8

    @property
    def protected(self) -> int:
        return self.window

    @property
    def observe(self) -> Observe:
        return Observe(last=self.window)

    def score(self, view: LayerView) -> Tensor:
        mass = F.avg_pool1d(view.mass, 5, stride=1, padding=2)
        return protect(mass, view, last=self.window)


@dataclass(frozen=True)
class Global(Evictor):
    """A budget over all layers and heads at once: KV-Compress's idea (Rehg, 2024)."""

    name: ClassVar[str] = "global"
    sinks: int = 2

    @property
    def protected(self) -> int:
        return self.sinks

    @property
    def scope(self) -> Literal["layer", "model"]:
        return "model"

    @property
    def observe(self) -> Observe:
        return Observe(last=None, group="sum", power=2, skip=4)

    def score(self, view: LayerView) -> Tensor:
        return protect(view.mass / view.seen.clamp(min=1), view, first=self.sinks)

    def plan(self, view: PlanView) -> Tensor:
        held = view.position >= 0
        score = view.score.masked_fill(~held, -torch.inf).movedim(1, 0)  # B N H L
        budget = view.budget * score.shape[1] * score.shape[2]
        keep = best(score.flatten(1), budget).view(score.shape).movedim(0, 1) & held
        return torch.where(keep, 0, DROP).to(torch.uint8)


@dataclass(frozen=True)
class Lean(Evictor):
    """Two tiers with thresholds and a step of one candidate and one victim: LeanKV, Algorithm 1.

    Where a head is full, the weakest token of its low tier is evicted, or a weaker candidate.
    """

    name: ClassVar[str] = "lean"
    high: float = 0.5
    low: float = -0.5

    @property
    def tiers(self) -> int:
        return 2

    @property
    def decode(self) -> Literal["grow", "step"]:
        return "step"

    @property
    def observe(self) -> Observe:
        return Observe(last=None, generated=True)

    def score(self, view: LayerView) -> Tensor:
        return view.mass / view.seen.clamp(min=1)

    def plan(self, view: PlanView) -> Tensor:
        kept = super().plan(view) != DROP
        stored = torch.where(view.tier == FRESH, 0, view.tier)
        tier = torch.where(view.score >= self.high, stored, 1)
        return torch.where(kept & (view.score >= self.low), tier, DROP).to(torch.uint8)

    def step(self, view: StepView) -> Step:
        tier = self._tier(view.candidate)
        source = tier.clamp(max=1)
        weakest = view.weakest.gather(0, source[None])[0]
        target = self._tier(weakest)
        moves = (tier != DROP) & (target > source) & weakest.isfinite()

        lower = torch.where(view.count[1] > 0, 1, 0)
        least = view.weakest.gather(0, lower[None])[0]
        full = (tier != DROP) & (view.count.sum(0) >= view.budget[:, None])
        full &= ~(moves & (target == DROP))
        tier = torch.where(full & (view.candidate <= least), DROP, tier)
        victim = torch.where(moves, source, NOBODY)
        victim = torch.where(full, torch.where(tier == DROP, NOBODY, lower), victim)
        target = torch.where(full, DROP, target)
        return Step(*(x.to(torch.uint8) for x in (tier, victim, target)))

    def _tier(self, score: Tensor) -> Tensor:
        return torch.where(score >= self.high, 0, torch.where(score >= self.low, 1, DROP))


@dataclass(frozen=True)
class Pair(Part):
    """Formats of two tiers, and a raw window."""

    name: ClassVar[str] = "pair"
    tiers: ClassVar[int] = 2
    window: ClassVar[int] = 4

    @property
    def formats(self) -> Formats:
        return self

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        return tuple(
            TokenFormat(RawCodec(shape.key_dim, dtype), RawCodec(shape.value_dim, dtype))
            for dtype in (torch.float32, torch.float16)
        )


@pytest.mark.parametrize(
    "policy",
    [
        Attended(Budget(64)),
        Attended(Budget(25, "percent"), window=1),
        Global(),
        Lean(),
        compose(Lean(), Pair()),
        compose(Attended(), Raw()),
    ],
    ids=str,
)
def test_every_case_satisfies_the_contract(policy: Part) -> None:
    check_policy(policy)


def plan_view(score: Tensor, budget: list[int], first_layer: int = 0) -> PlanView:
    length = torch.full((score.shape[1],), score.shape[-1])
    return PlanView(
        shape=replace(SHAPE, layers=max(1, score.shape[0]), kv_heads=score.shape[2]),
        first_layer=first_layer,
        score=score,
        position=torch.arange(score.shape[-1]).expand(score.shape),
        tier=torch.full(score.shape, FRESH, dtype=torch.uint8),
        length=length,
        budget=torch.tensor(budget),
    )


def test_a_layer_is_planned_head_by_head_with_a_budget_per_request() -> None:
    score = torch.rand(1, 3, 2, 20)
    plan = Attended().plan(plan_view(score, budget=[12, 8, 30]))
    assert (plan == 0).sum(-1).tolist() == [[[12, 12], [8, 8], [20, 20]]]
    kept = (plan == 0)[0, 0, 0].nonzero().squeeze(-1)
    assert set(kept.tolist()) == set(score[0, 0, 0].topk(12).indices.tolist())


def test_a_budget_is_shared_by_all_layers_and_heads_of_a_request() -> None:
    score = torch.rand(3, 2, 2, 20)
    score[1] += 1  # layer 1 matters more
    plan = Global().plan(plan_view(score, budget=[5, 15]))
    kept = (plan == 0).sum((0, 2, 3)).tolist()
    assert kept == [5 * 6, 15 * 6]
    assert (plan[1, 0] == 0).sum() == 30  # 30 of its 40: the whole budget of the request
    for b, total in enumerate(kept):
        least = score[:, b].flatten().topk(total).values.min()
        assert torch.equal(plan[:, b] == 0, score[:, b] >= least)


def test_algorithm_1_step_by_step() -> None:
    """Several decode steps of 12 heads against the paper's algorithm over plain lists."""
    policy, heads, steps = Lean(), (2, 2, 3), 40
    lists: list[list[list[float]]] = [[[], []] for _ in range(12)]
    count = torch.zeros(2, *heads, dtype=torch.long)
    stored = torch.full((2, *heads, steps), torch.inf)  # per tier: scores, inf for empty slots
    moved = 0
    for i in range(steps):
        # stored scores decay, so that victims appear
        stored -= 0.06
        lists = [[[s - 0.06 for s in tier] for tier in head] for head in lists]
        candidate = torch.randn(heads)
        step = policy.step(
            StepView(
                shape=SHAPE,
                first_layer=0,
                candidate=candidate,
                weakest=stored.amin(-1),
                count=count,
                tier_thresholds=torch.zeros_like(stored[..., 0]),
                length=torch.full((2,), i + 1),
                budget=torch.full((2,), 1000),
            )
        )
        slot = stored.argmin(-1)
        weakest = stored.amin(-1)
        for tier in (0, 1):
            leaves = step.victim == tier
            stored[tier].scatter_(
                -1, slot[tier, ..., None], torch.where(leaves, torch.inf, weakest[tier])[..., None]
            )
            enters = torch.where(step.candidate == tier, candidate, torch.inf)
            falls = torch.where((step.victim == 0) & (step.target == tier), weakest[0], torch.inf)
            for new in (enters, falls):
                free = stored[tier].isinf().long().argmax(-1, keepdim=True)
                stored[tier].scatter_(-1, free, new[..., None])
        count = stored.isfinite().sum(-1)
        moved += int((step.victim != NOBODY).sum())
        for head, score in zip(lists, candidate.flatten().tolist(), strict=True):
            algorithm_1(head, score, policy.high, policy.low)
    assert moved > 50
    for (high, low), ours in zip(lists, stored.flatten(1, 3).unbind(1), strict=True):
        for expected, tier in zip((high, low), ours, strict=True):
            found = tier[tier.isfinite()].sort().values.double()
            torch.testing.assert_close(
                found, torch.tensor(sorted(expected)).double(), rtol=0, atol=1e-5
            )


def algorithm_1(head: list[list[float]], candidate: float, high: float, low: float) -> None:
    kv_h, kv_l = head
    if candidate >= high:
        kv_h.append(candidate)
        victim = min(kv_h)
        if victim < high:
            kv_h.remove(victim)
            if victim >= low:
                kv_l.append(victim)
    elif candidate >= low:
        kv_l.append(candidate)
        victim = min(kv_l)
        if victim < low:
            kv_l.remove(victim)


def test_a_full_head_trades_its_weakest_token() -> None:
    view = StepView(
        shape=replace(SHAPE, layers=1, kv_heads=3),
        first_layer=0,
        candidate=torch.tensor([[[1.0, 0.1, 0.2]]]),
        weakest=torch.tensor([[[[0.5, 0.6, 0.7]]]]),
        count=torch.tensor([[[[4, 4, 3]]]]),
        tier_thresholds=torch.zeros(1, 1, 1, 3),
        length=torch.tensor([9]),
        budget=torch.tensor([4]),
    )
    step = Attended().step(view)
    assert step.candidate.tolist() == [[[0, DROP, 0]]]
    assert step.victim.tolist() == [[[0, NOBODY, NOBODY]]]
    assert step.target[0, 0, 0] == DROP


@pytest.mark.parametrize(
    "observe",
    [
        Observe(),  # StreamingLLM, knorm: nothing
        Observe(last=32),  # SnapKV: the prompt's last queries
        Observe(last=1, generated=True),  # TOVA: the newest query of every step
        Observe(last=None, group="sum", generated=True),  # H2O: every query
        Observe(last=None, power=2, group="sum", skip=10),  # KV-Compress: squares, no nearest ones
        Observe(last=None, group="max"),
    ],
)
def test_what_methods_observe_can_be_said(observe: Observe) -> None:
    assert replace(observe) == observe


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"last": -1}, "use a number of queries, or None for all"),
        ({"skip": -1}, "it must be 0 or more"),
        ({"group": "median"}, "sum, mean or max|group"),
        ({"power": 3}, "say 1 or 2|power"),
    ],
)
def test_what_cannot_be_observed_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):  # TypeError: checked annotations
        Observe(**wrong)


def test_positions_are_logical_and_stay_with_their_tokens() -> None:
    """After an eviction, sinks and the window are found by position, not by slot."""
    position = torch.tensor([[[0, 1, 7, 30, 31, 32], [0, 8, 9, 31, 32, -1]]])
    view = LayerView(
        layer=torch.tensor([0]),
        shape=replace(SHAPE, layers=1),
        position=position,
        fresh=position >= 30,
        score=torch.zeros(1, 2, 6),
        length=torch.tensor([33]),
    )
    kept = protect(torch.zeros(1, 2, 6), view, first=2, last=2) == torch.inf
    assert position[kept].tolist() == [0, 1, 31, 32, 0, 31, 32]
    whole = PlanView(
        shape=view.shape,
        first_layer=0,
        score=protect(position.float(), view, first=2)[None],
        position=position[None],
        tier=torch.where(view.fresh, FRESH, 0).to(torch.uint8)[None],
        length=view.length,
        budget=torch.tensor([3]),
    )
    plan = Attended().plan(whole)[0]
    assert position[plan == 0].tolist() == [0, 1, 32, 0, 31, 32]


def test_a_page_carries_positions_in_any_order() -> None:
    format = TokenFormat(RawCodec(4, torch.float16), RawCodec(4, torch.float16))
    layout = PageLayout.sized(format, 4, scores=True, positions=True)
    page = torch.zeros(layout.nbytes, dtype=torch.uint8)
    positions = torch.tensor([90, 3, 41, 7], dtype=torch.int32)
    page[layout.position_offset : layout.used] = positions.view(torch.uint8)
    page[layout.score_offset : layout.position_offset] = torch.rand(4).view(torch.uint8)
    assert page[layout.position_offset :].clone().view(torch.int32).tolist() == [90, 3, 41, 7]


def test_a_shard_of_the_heads_decides_as_inside_the_whole() -> None:
    view = plan_view(torch.rand(1, 2, 4, 20), budget=[5, 9])
    shard = replace(
        view,
        shape=replace(view.shape, kv_heads=2, first_head=2),
        score=view.score[:, :, 2:],
        position=view.position[:, :, 2:],
        tier=view.tier[:, :, 2:],
    )
    assert torch.equal(Attended().plan(shard), Attended().plan(view)[:, :, 2:])
    assert Attended().capabilities.splits_heads


def test_what_needs_all_heads_says_so() -> None:
    assert Global().capabilities == Capabilities(
        shortens=True, shares_prefixes=False, rolls_back=False, splits_heads=False
    )
    assert not compose(Global(), Raw()).capabilities.splits_heads


def test_a_shape_is_checked() -> None:
    assert SHAPE.token_bytes == 3 * 2 * (4 + 4) * 2
    with pytest.raises(ValueError, match="kv_heads is 0; a cache shape needs at least 1"):
        replace(SHAPE, kv_heads=0)
    with pytest.raises(ValueError, match="first_head is -1; it must be 0 or more"):
        replace(SHAPE, first_head=-1)


def test_a_budget_below_what_is_protected_is_refused() -> None:
    with pytest.raises(ValueError, match="a budget of 8 tokens is smaller than the 9 it protects"):
        Attended(Budget(8), window=9)
    assert Attended(Budget(1, "percent"), window=9).protected == 9


def test_a_method_without_a_score_says_so() -> None:
    position = torch.arange(4).expand(1, 2, 4)
    view = LayerView(
        torch.tensor([0]),
        SHAPE,
        position,
        position == 0,
        position.float(),
        length=torch.tensor([4]),
    )

    class Scoreless(Evictor):
        name = "scoreless"

    with pytest.raises(TypeError, match="Scoreless must define score"):
        Scoreless().score(view)
