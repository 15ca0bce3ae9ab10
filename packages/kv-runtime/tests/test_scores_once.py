"""Selectors that score a token once, by the model's own key and value, when it arrives."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from kv_policy import (
    DROP,
    NOBODY,
    Budget,
    Evictor,
    LayerView,
    Observe,
    PlanView,
    Replan,
    Selector,
    Step,
    StepView,
    VectorName,
    compose,
)
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE, Cut, Exact, Turned
from tiered_world import World, one, ragged

SEEN: list[tuple[int, int]] = []  # rows and columns of each view
ADJUSTED: list[tuple[Tensor, Tensor, Tensor]] = []  # positions, scores and masses of each view


def worth(key: Tensor, value: Tensor) -> Tensor:
    return 3 * key[..., 0] - value[..., 1] + key[..., 2] * value[..., 0]


@dataclass(frozen=True)
class Worthy(Evictor):
    """Keep the tokens of the largest worth, in each head."""

    name: ClassVar[str] = "worthy"
    reads = frozenset({"keys", "values"})
    scores_once = True

    every: int = 0

    @property
    def replan(self) -> Replan:
        """After prompts, and while generating if asked."""
        return Replan(self.every)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return a token's worth; note what was given."""
        assert view.keys is not None
        assert view.values is not None
        assert bool(view.fresh[view.position >= 0].all())
        SEEN.append((view.position.shape[0], view.position.shape[-1]))
        assert (view.keys.shape[-1], view.values.shape[-1]) == (SHAPE.key_dim, SHAPE.value_dim)
        return worth(view.keys, view.values)


@dataclass(frozen=True)
class WorthyTogether(Worthy):
    """The same, with all layers planned at once."""

    name: ClassVar[str] = "worthy-together"
    scope = "model"


def expect_best(world: World, count: int) -> None:
    """Check that every head holds its best tokens of all those seen."""
    for layer in range(SHAPE.layers):
        held = world.kept(layer)
        score = worth(world.key[layer], world.value[layer])
        for b, seen in enumerate(world.seen.tolist()):
            best = score[b, :, :seen].topk(min(count, seen), dim=-1).indices
            right = torch.zeros_like(held[b, :, :seen]).scatter(1, best, True)
            assert torch.equal(held[b, :, :seen], right)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("basis", [None, Turned("622256", "133341")], ids=str)
@pytest.mark.parametrize("policy", [Worthy(Budget(9)), WorthyTogether(Budget(9))], ids=str)
def test_stored_tokens_keep_the_score_of_their_own_vectors(
    policy: Worthy, basis: Turned | None, window: int
) -> None:
    SEEN.clear()
    parts = [policy, Exact(1, window), *([] if basis is None else [basis])]
    world = World(compose(*parts))
    world.forward(ragged(31, 18))
    if not window:
        expect_best(world, 9)
    for _ in range(6):
        world.forward(one())
    world.forward(ragged(12, 3))
    if not window:
        expect_best(world, 9)
    # The widths of the passes; a step scores some layers at once.
    assert {columns for _, columns in SEEN} == {31, 1, 12}


def test_generated_tokens_join_plans_by_their_own_score() -> None:
    world = World(Worthy(Budget(9), every=4))
    world.forward(ragged(31, 18))
    for _ in range(8):
        world.forward(one())
    expect_best(world, 9)


def test_what_reads_the_models_vectors_is_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="basis is folded"):
        PolicyCache(
            compose(Worthy(Budget(9)), Turned("4", "3")), SHAPE, folded=frozenset({"values"})
        )
    with pytest.raises(ValueError, match="stores 2 KV heads together"):
        PolicyCache(compose(Worthy(Budget(9)), Turned("75", "46", together=2)), SHAPE)
    folded = replace(SHAPE, folded="0123456789abcdef")
    with pytest.raises(
        ValueError, match="by the model's own values, but this model's weights hold"
    ):
        PolicyCache(compose(Worthy(Budget(9)), Cut("4", "3")), folded)
    PolicyCache(Worthy(Budget(9)), folded)


@dataclass(frozen=True)
class Asked(Worthy):
    """Adds the attention of the last four queries of a prompt to a token's worth."""

    name: ClassVar[str] = "asked"

    @property
    def observe(self) -> Observe:
        """The last queries."""
        return Observe(last=4, group="sum")

    def adjust(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the sum; note what was given."""
        assert view.keys is view.values is None
        assert view.mass is not None
        assert not view.mass[view.position < 0].any()
        place = view.position.masked_fill(view.position < 0, 999)
        assert bool((place.diff(dim=-1) >= 0).all())
        ADJUSTED.append((view.position, view.score, view.mass))
        return view.score + 9 * view.mass


@dataclass(frozen=True)
class AskedTogether(Asked):
    """The same, with all layers planned at once."""

    name: ClassVar[str] = "asked-together"
    scope = "model"


@pytest.mark.parametrize("policy", [Asked(Budget(9)), AskedTogether(Budget(9))], ids=str)
def test_the_end_of_a_prompt_adjusts_the_scores_of_all_its_tokens(policy: Asked) -> None:
    ADJUSTED.clear()
    world = World(policy)
    world.forward(ragged(20, 9), more=True)
    assert not ADJUSTED  # a prompt that is not whole is not planned
    world.forward(ragged(11, 9))
    assert len(ADJUSTED) == SHAPE.layers
    expect_adjusted(world, ADJUSTED)
    for layer, (position, score, mass) in enumerate(ADJUSTED):
        there = position >= 0
        own = worth(world.key[layer], world.value[layer]).gather(2, position.clamp(min=0))
        torch.testing.assert_close(score[there], own[there])  # each token's, from its own pass
        total = mass.sum(-1)
        torch.testing.assert_close(total, torch.full_like(total, 4 * SHAPE.group))
    ADJUSTED.clear()
    for _ in range(3):
        world.forward(one())
    assert not ADJUSTED  # nor does a generated query adjust anything
    world.forward(ragged(5, 6))
    assert len(ADJUSTED) == SHAPE.layers
    expect_adjusted(world, ADJUSTED)


@dataclass(frozen=True)
class Misshapen(Asked):
    """Returns a score for each head."""

    name: ClassVar[str] = "misshapen"

    def adjust(self, view: LayerView) -> Tensor:
        """Return another shape than that of the view."""
        return view.score.sum(-1)


def test_adjusted_scores_of_another_shape_are_refused_by_their_method() -> None:
    with pytest.raises(ValueError, match=r"misshapen scored layer 0 with .*; adjust\(view\) ret"):
        World(Misshapen(Budget(9))).forward(ragged(20, 9))


def expect_adjusted(world: World, given: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Check that the heads hold the best tokens by adjusted score."""
    for layer, (position, score, mass) in enumerate(given):
        total = (score + 9 * mass).masked_fill(position < 0, -torch.inf)
        best = position.gather(2, total.topk(9, dim=-1).indices)
        right = torch.zeros_like(world.kept(layer)).scatter(2, best, True)
        assert torch.equal(world.kept(layer), right)


@dataclass(frozen=True)
class Above(Evictor):
    """Keep the tokens whose worth reaches zero, and the newest three, token by token."""

    name: ClassVar[str] = "above"

    @property
    def selector(self) -> Selector:
        """The rule of single tokens, which has no budget."""
        return AboveRule()


class AboveRule:
    """The rule of `Above`."""

    reads: ClassVar[frozenset[VectorName]] = frozenset({"keys", "values"})
    scores_once: ClassVar[bool] = True
    plans_chunks: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        assert view.keys is not None
        assert view.values is not None
        return worth(view.keys, view.values)

    def plan(self, view: PlanView) -> Tensor:
        newest = view.position >= (view.length - 3)[None, :, None, None]
        return torch.where((view.position >= 0) & (newest | (view.score >= 0)), 0, DROP).byte()

    def step(self, view: StepView) -> Step:
        victim = torch.where(view.weakest[0] < 0, 0, NOBODY).byte()
        return Step(torch.zeros_like(victim), victim, torch.full_like(victim, DROP))

    def recent_tokens(self, budget: Tensor) -> Tensor:
        return torch.full_like(budget, 3)


def expect_rule(world: World) -> None:
    """Check that the heads hold the tokens of worth and the newest three."""
    for layer in range(SHAPE.layers):
        held = world.kept(layer)
        score = worth(world.key[layer], world.value[layer])
        for b, seen in enumerate(world.seen.tolist()):
            newest = torch.arange(seen) >= seen - 3
            assert torch.equal(held[b, :, :seen], newest | (score[b, :, :seen] >= 0))


def test_a_rule_of_single_tokens_holds_after_every_pass() -> None:
    world = World(Above())
    for brings in (ragged(31, 18), ragged(7, 12), *(one() for _ in range(9)), ragged(4, 4)):
        world.forward(brings)
        expect_rule(world)


def test_a_rule_of_single_tokens_evicts_after_every_chunk_of_a_prompt() -> None:
    world, waits = World(Above()), World(WorthyTogether(Budget(9)))
    for _ in range(4):
        world.forward(ragged(12, 12), more=True)
        waits.forward(ragged(12, 12), more=True)
        expect_rule(world)
        assert waits.kept(0)[..., : int(waits.seen[0])].all()  # a budget is for a whole prompt
    assert world.cache.batch.pool.used < waits.cache.batch.pool.used
    world.forward(ragged(12, 12))
    expect_rule(world)
