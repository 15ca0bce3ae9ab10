"""Plan the stored tokens of some sequences again, by their stored scores."""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import FRESH, CompleteSelector, PlanView
from kv_runtime.batch import Batch, grid
from kv_runtime.retain.apply import restack
from kv_runtime.retain.planning import Group, Scored, planned

_TOGETHER: Final = 1 << 20  # tokens planned at once, which bounds the memory


def replan(
    selector: CompleteSelector, batch: Batch, sequences: Sequence[int], budget: Int[Tensor, " B"]
) -> Float[Tensor, "K N D H"] | None:
    """Plan sequences, with all layers at once if they share a budget, and apply the plan.

    Sequences are planned independently, so the number planned at once does not matter.

    Args:
        selector: the selector.
        batch: the stored tokens.
        sequences: D sequences.
        budget: tokens per head, for every sequence of the batch.

    Returns:
        The selector's `tier_thresholds` of these sequences, if it computes any.
    """
    layers, together = batch.shape.layers, 1 if selector.scope == "layer" else batch.shape.layers
    longest = max((store.longest for _, store in batch.held_stores), default=1)
    few = max(1, _TOGETHER // (together * batch.shape.kv_heads * longest))
    found = []
    for i in range(0, len(sequences), few):
        rows = torch.tensor(sequences[i : i + few], device=batch.seen.device)
        each = (
            _replan(selector, batch, slice(first, first + together), rows, budget[rows])
            for first in range(0, layers, together)
        )
        tier_thresholds = [x for x in each if x is not None]
        if tier_thresholds:
            found.append(torch.cat(tier_thresholds, 1))
    return torch.cat(found, 2) if found else None


def _replan(
    selector: CompleteSelector,
    batch: Batch,
    layers: slice,
    rows: Int[Tensor, " D"],
    budget: Int[Tensor, " D"],
) -> Float[Tensor, "K n D H"] | None:
    groups = _held(batch, layers, rows)
    scored, count = Scored.carried(groups), layers.stop - layers.start

    def by_layer(x: Tensor) -> Tensor:
        return x.view(count, len(rows), *x.shape[1:])

    view = PlanView(
        shape=batch.shape,
        first_layer=layers.start,
        score=by_layer(scored.score),
        position=by_layer(scored.position),
        tier=by_layer(scored.tier),
        length=batch.seen[rows],
        budget=budget,
        page=batch.layout.page_tokens[..., layers, :],
    )
    plan, tier_thresholds = planned(selector, view, batch.window_size)
    parts = scored.split(plan.flatten(0, 1))
    table_rows = batch.table_rows(layers, rows).view(-1, batch.shape.kv_heads)
    # Tokens that move to another tier are decoded, one layer at a time.
    step = len(table_rows) if selector.tiers == 1 else len(rows)
    for i in range(0, len(table_rows), step):
        some = slice(i, i + step)
        mine, kept = [group.of(some) for group in groups], [part[some] for part in parts]
        restack(batch, table_rows[some].flatten(), mine, kept)
    return tier_thresholds


def _held(batch: Batch, layers: slice, rows: Int[Tensor, " D"]) -> list[Group]:
    """Return sequences' tokens in stores and the window, with rows grouped by layer."""
    heads, groups = batch.shape.kv_heads, []
    table_rows = batch.table_rows(layers, rows)
    for tier, store in batch.held_stores:
        held = store.read(table_rows)
        assert held.position is not None  # pages of a selector store both
        assert held.score is not None
        position, score = grid(held.position, heads), grid(held.score, heads)
        groups.append(Group(position, tier, fresh=False, store=store, score=score))
    raw = batch.held_window
    if raw is not None:
        position = batch.by_head(raw.position[rows].repeat(layers.stop - layers.start, 1))
        carried = raw.scores_of(layers)[:, rows].flatten(0, 1) if raw.has_scores else None
        groups.append(Group(position, FRESH, fresh=False, score=carried))
    return groups
