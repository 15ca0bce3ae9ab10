"""Selectors whose plans go by other scores than the stored ones, of the tokens that are held."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kv_policy import Budget, Evictor, LayerView, Observe, Replan, compose
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE, Exact, Turned
from tiered_world import World, one, ragged

BUDGET = 9
VIEWS: list[LayerView] = []  # what `rescore` was given


def worth(key: Tensor) -> Tensor:
    """The stored score."""
    return 2 * key[..., 0]


def apart(score: Tensor, key: Tensor, value: Tensor, there: Tensor) -> Tensor:
    """The score of a plan: it depends on all the tokens that are there."""
    held = there[..., None].to(key.dtype)
    mean = (key * held).sum(-2, keepdim=True) / held.sum(-2, keepdim=True).clamp(min=1)
    return score + 3 * (key - mean).norm(dim=-1) - value[..., 1]


@dataclass(frozen=True)
class Apart(Evictor):
    """Keep the tokens that are far from the mean of those held."""

    name: ClassVar[str] = "apart"
    reads = frozenset({"keys", "values"})

    every: int = 0
    short: bool = False
    most: int | None = None

    @property
    def observe(self) -> Observe:
        """So that generated tokens are scored, too."""
        return Observe(last=2, generated=True)

    @property
    def replan(self) -> Replan:
        """As the parameters set it."""
        return Replan(self.every, short=self.short, most=self.most)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return what is stored."""
        assert view.keys is not None
        return worth(view.keys)

    def rescore(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return what the plan goes by; note what was given."""
        assert view.keys is not None
        assert view.values is not None
        VIEWS.append(view)
        return apart(view.score, view.keys, view.values, view.position >= 0)


@dataclass(frozen=True)
class ApartTogether(Apart):
    """The same, with all layers planned at once."""

    name: ClassVar[str] = "apart-together"
    scope = "model"


@dataclass(frozen=True)
class ApartOnce(Apart):
    """The same, with stored scores that are computed once, by the model's own vectors."""

    name: ClassVar[str] = "apart-once"
    scores_once = True
    observe = Observe()


SCOPES = pytest.mark.parametrize("kind", [Apart, ApartTogether, ApartOnce])


class Watched(World):
    """A world that knows what every plan should see and keep."""

    def held(self, brings: Tensor) -> Tensor:
        """[N, B, H, 400] bool: what is held before a pass, and what it brings."""
        place = torch.arange(400)
        total = self.seen + brings.sum(-1)
        new = (place >= self.seen[:, None]) & (place < total[:, None])
        return torch.stack([self.kept(layer) | new[:, None] for layer in range(SHAPE.layers)])

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as they are stored, padded to the longest of any layer."""
        if self.basis is None:
            return self.key[layer], self.value[layer]
        maps, shape = self.basis.bind(layer, SHAPE), self.cache.layout.shape
        key, value = maps.key.project(self.key[layer]), maps.value.project(self.value[layer])
        return (
            pad(key, (0, shape.key_dim - key.shape[-1])),
            pad(value, (0, shape.value_dim - value.shape[-1])),
        )

    def expect_planned(self, held: Tensor, rows: Sequence[int]) -> None:
        """Check that these sequences, and no others, keep the best by `rescore` of what was held.

        And that `rescore` saw exactly that, and that the stored scores are still those of `score`.
        """
        assert len(VIEWS) == (SHAPE.layers if rows else 0)
        for layer in range(SHAPE.layers):
            key, value = self.stored(layer)
            once = self.cache.policy.selector.scores_once
            score = worth(self.key[layer] if once else key)
            right = held[layer].clone()
            for i, row in enumerate(rows):
                there = held[layer][row]
                self.expect_seen(VIEWS[layer], i, there, score[row], key[row], value[row])
                raw = torch.arange(400) >= self.seen[row] - self.cache.layout.window
                total = apart(score[row], key[row], value[row], there)
                total = total.masked_fill(~there | raw, -torch.inf)
                best = torch.zeros_like(there)
                best.scatter_(1, total.topk(BUDGET, dim=-1).indices, True)
                right[row] = there & (best | raw)
            assert torch.equal(self.kept(layer), right)
            self.expect_scores(layer, score)
        VIEWS.clear()

    def expect_seen(
        self, view: LayerView, i: int, there: Tensor, score: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Check a row of a view: all tokens, by position, with their scores and vectors."""
        assert view.mass is view.seen is view.queries is view.rope is None
        for head, positions in enumerate(view.position[i].tolist()):
            mine = there[head].nonzero()[:, 0]
            count = len(mine)
            assert positions == [*mine.tolist(), *[-1] * (len(positions) - count)]
            for given, right in ((view.score, score), (view.keys, key), (view.values, value)):
                torch.testing.assert_close(given[i, head, :count], right[head, mine])
            assert not view.keys[i, head, count:].any()

    def expect_scores(self, layer: int, score: Tensor) -> None:
        """Check the scores in pages."""
        batch = self.cache.batch
        for store in batch.stores:
            read = store.read(batch.table_rows(slice(layer, layer + 1)))
            place = read.position.long().clamp(min=0)
            right = score.flatten(0, 1).gather(1, place)
            torch.testing.assert_close(read.score[read.held], right[read.held])


@pytest.fixture(autouse=True)
def _no_views() -> None:
    VIEWS.clear()


@SCOPES
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("basis", [None, Turned("645", "534")], ids=str)
def test_a_plan_goes_by_all_that_is_held_and_stores_nothing_of_it(
    kind: type[Apart], basis: Turned | None, window: int
) -> None:
    parts = [kind(Budget(BUDGET), every=4), Exact(1, window), *([] if basis is None else [basis])]
    world = Watched(compose(*parts))

    def go(brings: Tensor, rows: Sequence[int], *, more: bool = False) -> None:
        held = world.held(brings)
        world.forward(brings, more=more)
        world.expect_planned(held, rows)

    go(ragged(14, 17), (), more=True)  # a prompt that is not whole is not planned
    go(ragged(13, 3), (0, 1))
    for step in range(1, 9):
        go(one(), (0, 1) if step % 4 == 0 else ())
    go(ragged(4, 6), (0, 1))  # another turn
    for step in range(1, 5):
        go(one(), (0, 1) if step % 4 == 0 else ())


@SCOPES
def test_a_sequence_that_waits_is_rescored_when_its_turn_comes(kind: type[Apart]) -> None:
    world = Watched(kind(Budget(BUDGET), every=3, most=1))
    for brings, rows in (
        (ragged(20, 25), (0,)),
        (one(), (1,)),
        (one(), ()),
        (one(), (0,)),
        (one(), (1,)),
    ):
        held = world.held(brings)
        world.forward(brings)
        world.expect_planned(held, rows)


@SCOPES
def test_short_pages_are_freed_by_the_scores_of_that_time(kind: type[Apart]) -> None:
    world = Watched(kind(Budget(BUDGET), short=True))
    world.forward(ragged(20, 12))
    world.go_on(3)
    VIEWS.clear()
    held = world.held(torch.zeros(2, 1, dtype=torch.bool))
    assert world.cache.compress() == [0, 1]
    world.expect_planned(held, (0, 1))


def test_a_pool_that_runs_out_is_planned_by_what_is_stored() -> None:
    # A pool of 4 pages for each head, of 4 tokens: the 17th token of a head finds none.
    world = Watched(Apart(Budget(BUDGET), short=True), pages=4 * 2 * 2 * SHAPE.layers)
    world.forward(ragged(16, 15))
    world.go_on(7)
    VIEWS.clear()
    before = world.seen.tolist()
    held = world.held(torch.zeros(2, 1, dtype=torch.bool))
    world.forward(one())
    assert VIEWS
    rows = set()
    for view in VIEWS:
        layer = int(view.layer[0])
        key, value = world.stored(layer)
        for i, length in enumerate(view.length.tolist()):
            row = before.index(length)
            world.expect_seen(view, i, held[layer][row], worth(key)[row], key[row], value[row])
            rows.add(row)
    for layer in range(SHAPE.layers):
        counts = world.kept(layer).sum(-1)
        assert counts.tolist() == [[(BUDGET if row in rows else 16) + 1] * 2 for row in range(2)]


@dataclass(frozen=True)
class Fails(Apart):
    """Fails about a sequence of 17 tokens."""

    name: ClassVar[str] = "fails"

    def rescore(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Raise if a sequence has that length."""
        if bool((view.length == 17).any()):
            raise ArithmeticError("a sequence has 17 tokens")
        return super().rescore(view)


@dataclass(frozen=True)
class Sums(Apart):
    """Returns one number per sequence."""

    name: ClassVar[str] = "sums"

    def rescore(self, view: LayerView) -> Tensor:
        """Return another shape."""
        return super().rescore(view).sum((1, 2))


@dataclass(frozen=True)
class Divides(Apart):
    """Divides by zero, where a sequence has more than 20 tokens."""

    name: ClassVar[str] = "divides"

    def rescore(self, view: LayerView) -> Tensor:
        """Return NaN for a long sequence."""
        nothing = (view.length[:, None, None] <= 20).float() * 0
        return torch.where(view.length[:, None, None] > 20, nothing / 0, super().rescore(view))


def test_an_error_of_one_sequence_leaves_the_others_their_plans() -> None:
    world = Watched(Fails(Budget(BUDGET), every=2), careful=True)
    world.forward(ragged(12, 15))
    world.forward(one())
    world.forward(one())
    found = world.cache.failures()
    assert list(found) == [1]
    assert isinstance(found[1], ArithmeticError)
    counts = [world.kept(layer).sum(-1).tolist() for layer in range(SHAPE.layers)]
    assert counts == [[[BUDGET] * 2, [BUDGET + 2] * 2]] * SHAPE.layers


@pytest.mark.parametrize("lengths", [(30, 22), (19, 18)])
def test_what_is_no_score_is_refused(lengths: tuple[int, int]) -> None:
    for policy, message in (
        (Sums(Budget(BUDGET), every=4), r"sums scored layer 0 .* rescore\(view\) returns floats"),
        (Divides(Budget(BUDGET), every=4), "divides rescored layer 0 with NaN"),
    ):
        with pytest.raises(ValueError, match=message):  # noqa: PT012
            world = World(policy)
            world.forward(ragged(*lengths))
            world.go_on(4)


def test_a_cache_that_shares_a_prefill_is_rescored_as_one_that_attends() -> None:
    leader, follower = Apart(Budget(BUDGET)), ApartTogether(Budget(BUDGET))
    caches = [PolicyCache(policy, SHAPE, page_tokens=4) for policy in (leader, follower)]
    draw = torch.Generator().manual_seed(0)
    key = torch.randn(SHAPE.layers, 1, 2, 20, 6, generator=draw)
    value = torch.randn(SHAPE.layers, 1, 2, 20, 5, generator=draw)
    for cache in caches:
        cache.begin(ragged(20))
    for layer in range(SHAPE.layers):
        query = torch.randn(1, 2, 2, 20, 6, generator=draw)
        for cache in caches:
            cache.attend(layer, query, key[layer], value[layer], 0.4)
    one_by_one, at_once = (
        [store.read(store.table_rows()).position for store in cache.batch.stores]
        for cache in caches
    )
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, at_once, strict=True))
