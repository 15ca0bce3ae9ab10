"""Shared cases for tests of methods that merge: views, and what a merge leaves of the vectors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import SHAPE, ragged
from kv_policy import Merge, MergeView

Loop: TypeAlias = Callable[[MergeView, int, int], tuple[dict[tuple[int, int], float], float | None]]

VIEWS: Final = {
    "seed": st.integers(0, 9999),
    "lengths": st.tuples(st.integers(1, 40), st.integers(1, 40)),
    "keep": st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    "first": st.booleans(),
}


def merging(seed: int, lengths: tuple[int, ...], keep: float, *, first: bool) -> MergeView:
    """Return a view whose keys come in runs that are alike; scores of empty slots are NaN."""
    draw = torch.Generator().manual_seed(seed)
    stored = tuple(n // 2 for n in lengths)
    position = ragged(seed, 1, lengths, stored)[0]
    there = position >= 0
    kept = (torch.rand(position.shape, generator=draw) < keep) & there

    def random(*more: int) -> Tensor:
        return torch.rand(*position.shape, *more, generator=draw, dtype=torch.float64)

    anchors = 2 * random(SHAPE.key_dim) - 1
    turn = (random() < 0.4).long().cumsum(-1)  # neighbours with one anchor are alike
    keys = anchors.gather(2, turn.clamp(max=position.shape[2] - 1)[..., None].expand_as(anchors))
    keys = keys + 0.3 * random(SHAPE.key_dim)
    threshold = torch.zeros(position.shape[:2], dtype=torch.float64)
    return MergeView(
        layer=torch.full((len(lengths),), 3),
        shape=SHAPE,
        position=position,
        kept=kept,
        score=random().masked_fill(~there, torch.nan),
        length=torch.tensor(lengths),
        threshold=threshold if first else threshold + 0.6,
        keys=keys.masked_fill(~there[..., None], 0),
        values=random(SHAPE.value_dim).masked_fill(~there[..., None], 0),
    )


def share_of(view: MergeView, merge: Merge) -> Tensor:
    """[B, H, L, L]: how much of each token is in each kept one."""
    own = view.kept.double() if merge.own is None else merge.own.double().where(view.kept, 0)
    weight = merge.weight.double() * view.dropped[..., None]
    place = merge.target.where(weight != 0, 0)
    return torch.diag_embed(own).scatter_add(-1, place, weight)


def expect_as_loop(view: MergeView, merge: Merge, loop: Loop) -> None:
    """Compare a merge with that of a loop over the tokens of each head."""
    right = torch.zeros(*view.position.shape, view.position.shape[-1], dtype=torch.float64)
    for b, h in torch.cartesian_prod(*map(torch.arange, view.position.shape[:2])).tolist():
        found, threshold = loop(view, b, h)
        for (token, target), weight in found.items():
            right[b, h, token, target] = weight
        if threshold is not None:
            assert merge.threshold is not None
            assert abs(float(merge.threshold[b, h]) - threshold) < 1e-12
    torch.testing.assert_close(share_of(view, merge), right, rtol=1e-12, atol=1e-12)


def without_keys(view: MergeView) -> MergeView:
    """Return the view with other vectors, which a method that ignores them must not see."""
    return replace(view, keys=view.keys * 0, values=view.values * 0)
