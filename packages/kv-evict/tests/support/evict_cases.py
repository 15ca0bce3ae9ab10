"""Shared cases for tests of evictors: ragged heads, plans, and executed steps."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from hypothesis import settings
from torch import Tensor

from kv_evict import SnapKV
from kv_policy import (
    DROP,
    FRESH,
    NOBODY,
    CacheShape,
    LayerView,
    PlanView,
    Selector,
    StepView,
    complete,
)

quick: Final[settings] = settings(max_examples=30, deadline=None, derandomize=True)

# Per sequence (two): the number of tokens, and how many of them were stored by earlier passes.
LENGTHS: Final[tuple[int, int]] = (30, 11)
STORED: Final[tuple[int, int]] = (14, 3)


def shape(layers: int = 1, heads: int = 3) -> CacheShape:
    return CacheShape(layers, kv_heads=heads, group=2, key_dim=5, value_dim=4)


SHAPE: Final[CacheShape] = shape()


def ragged(
    seed: int,
    layers: int = 1,
    lengths: Sequence[int] = LENGTHS,
    stored: Sequence[int] = STORED,
    least: int = 0,
) -> Tensor:
    """Return positions [N B 3 L]: stored tokens differ between heads, later ones do not.

    Each head holds at least `least` stored tokens. Its last two slots are empty.
    """
    draw = torch.Generator().manual_seed(seed)
    position = torch.full((layers, len(lengths), 3, max(lengths) + 2), -1)
    for head in torch.cartesian_prod(*map(torch.arange, position.shape[:3])).tolist():
        length, old = lengths[head[1]], stored[head[1]]
        count = int(torch.randint(min(least, old), old + 1, (), generator=draw))
        some = torch.randperm(old, generator=draw)[:count].sort().values
        held = torch.cat([some, torch.arange(old, length)])
        position[*head, : len(held)] = held
    return position


def keyed(seed: int) -> LayerView:
    """Return a layer view with keys; each head holds at least one stored token."""
    position = ragged(seed, least=1)[0]
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(*position.shape, SHAPE.key_dim, generator=draw, dtype=torch.float64)
    return LayerView(
        layer=torch.zeros_like(torch.tensor(LENGTHS)),
        shape=SHAPE,
        position=position,
        fresh=position >= torch.tensor(STORED)[:, None, None],
        score=torch.rand(position.shape, generator=draw, dtype=torch.float64),
        length=torch.tensor(LENGTHS),
        keys=keys.masked_fill(position[..., None] < 0, 0),
    )


def attended(seed: int, window: int) -> LayerView:
    """Return a layer view with the last queries' attention: peaked in some heads, flat in some."""
    draw, position = torch.Generator().manual_seed(seed), ragged(seed)[0]
    length = torch.tensor(LENGTHS)
    fresh = position >= torch.tensor(STORED)[:, None, None]
    seen = (length[:, None, None] - position).clamp(max=window).masked_fill(position < 0, 0)
    steep = torch.rand(2, 3, 1, generator=draw, dtype=torch.float64) * 9
    mass = torch.rand(position.shape, generator=draw, dtype=torch.float64).pow(steep) * seen
    return LayerView(
        layer=torch.zeros_like(length),
        shape=SHAPE,
        position=position,
        fresh=fresh,
        score=torch.rand(position.shape, generator=draw).masked_fill(fresh, 0),
        length=length,
        mass=mass,
        seen=seen,
    )


def check_scores_of_snapkv(policy: type[SnapKV]) -> None:
    """Compare a policy's scores with SnapKV's for the same parameters."""
    view = attended(3, window=4)
    for options in ({"pool": 3}, {"pool": 5, "pooling": "max"}):
        found = policy(window=4, **options).score(view)
        assert torch.equal(found, SnapKV(window=4, **options).score(view))


def random_scores(seed: int, position: Tensor, lengths: Sequence[int], window: int) -> Tensor:
    """Return scores [N B H L] from 0 to 1; those of the window, the newest tokens, are infinite."""
    score = torch.rand(position.shape, generator=torch.Generator().manual_seed(seed))
    newest = torch.tensor(lengths)[:, None, None] - window
    return score.masked_fill(position >= newest, torch.inf)


def plan_view(
    score: Tensor,
    position: Tensor,
    lengths: Sequence[int],
    budgets: Sequence[int],
    head_stats: Tensor | None = None,
) -> PlanView:
    """Return the plan view after a prompt, for scores and positions [N B H L] in the tier FRESH.

    The score of empty slots is NaN, which must not matter.
    """
    return PlanView(
        shape=shape(len(position), position.shape[2]),
        first_layer=0,
        score=score.masked_fill(position < 0, torch.nan),
        position=position,
        tier=torch.full_like(position, FRESH, dtype=torch.uint8),
        length=torch.tensor(lengths),
        budget=torch.tensor(budgets),
        head_stats=head_stats,
    )


def plan_at_random(
    policy: SnapKV,
    position: Tensor,
    lengths: Sequence[int],
    budgets: Sequence[int],
    seed: int = 0,
    head_stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a plan, and the random scores it was made from."""
    score = random_scores(seed, position, lengths, policy.window)
    return policy.plan(plan_view(score, position, lengths, budgets, head_stats)), score


def planned(policy: Selector, view: LayerView, budgets: Sequence[int]) -> Tensor:
    """Return the plan [B H L] of a layer, by the policy's own scores."""
    score, lengths = policy.score(view)[None], view.length.tolist()
    return policy.plan(plan_view(score, view.position[None], lengths, budgets))[0]


def worth(position: Tensor, score: Tensor) -> dict[int, float]:
    """Return the tokens of a head, and their scores."""
    each = zip(position.tolist(), score.tolist(), strict=True)
    return {p: s for p, s in each if p >= 0}


def best(scores: dict[int, float], count: int) -> list[int]:
    """Return the tokens with the highest scores, the earlier of ties, in order of position."""
    return sorted(sorted(scores, key=lambda p: (-scores[p], p))[:count])


def check_counts(
    plan: Tensor, score: Tensor, position: Tensor, counts: Iterable[Iterable[int]]
) -> None:
    """Compare a sequence's plan [N H L] with the best tokens of each head.

    The number kept is given per head; several numbers where rounding decides.
    """
    heads = (x.flatten(0, 1) for x in (plan, score, position))
    for tiers, scores, places, choices in zip(*heads, counts, strict=True):
        mine = worth(places, scores)
        assert places[tiers != DROP].tolist() in [best(mine, count) for count in choices]


def filled(asked: list[float], length: int) -> list[float]:
    """Return what heads keep: amounts beyond the prompt are redistributed to free capacity."""
    kept = [min(a, length) for a in asked]
    room, excess = length * len(asked) - sum(kept), sum(asked) - sum(kept)
    return [k + (length - k) * min(1, excess / max(room, 1)) for k in kept]


def step(
    policy: Selector,
    held: dict[int, float],
    at: int,
    score: float,
    budget: int,
    share: float = 0.0,
) -> list[int]:
    """Execute one step of a head with these positions and scores.

    The token at position `at` arrives; `share` is the threshold set after the prompt.
    """
    recent_tokens = complete(policy).recent_tokens(torch.tensor([budget]))
    newer = at + 1 - (0 if recent_tokens is None else int(recent_tokens))
    may_go = {p: s for p, s in held.items() if p < newer}
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    answer = complete(policy).step(
        StepView(
            shape=SHAPE,
            first_layer=0,
            candidate=one * score,
            weakest=one[None] * min(may_go.values(), default=math.inf),
            count=torch.full((1, 1, 1, 1), len(held)),
            tier_thresholds=share * one[None],
            length=torch.tensor([at + 1]),
            budget=torch.tensor([budget]),
        )
    )
    stay = set(held)
    if answer.victim.item() != NOBODY:
        assert answer.target.item() == DROP
        stay.remove(min(may_go, key=lambda p: may_go[p]))
    assert answer.candidate.item() in (0, DROP)
    if answer.candidate.item() != DROP:
        stay.add(at)
    return sorted(stay)
