"""Plan the stored tokens of some sequences again, by their stored scores or `rescore`."""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_policy import FRESH, CompleteSelector, PlanView, VectorName
from kv_runtime.batch import Batch, grid
from kv_runtime.retain.apply import restack
from kv_runtime.retain.merging import merged
from kv_runtime.retain.planning import Group, Scored, planned, rescored

_TOGETHER: Final = 1 << 20  # tokens planned at once, which bounds the memory
_DECODED: Final = 1 << 18  # tokens whose vectors are decoded at once, for `rescore`


def replan(
    selector: CompleteSelector,
    batch: Batch,
    sequences: Sequence[int],
    budget: Int[Tensor, " B"],
    merge_thresholds: Float[Tensor, "N B H"] | None = None,
) -> Float[Tensor, "K N D H"] | None:
    """Plan sequences, with all layers at once if they share a budget, and apply the plan.

    Sequences are planned independently, so the number planned at once does not matter.

    Args:
        selector: the selector.
        batch: the stored tokens.
        sequences: D sequences.
        budget: tokens per head, for every sequence of the batch.
        merge_thresholds: those of the last merges, if the selector merges.

    Returns:
        The selector's `tier_thresholds` of these sequences, if it computes any, or its thresholds
        of merges.
    """
    layers, together = batch.shape.layers, 1 if selector.scope == "layer" else batch.shape.layers
    longest = max((store.longest for _, store in batch.held_stores), default=1)
    each_layer = batch.shape.kv_heads * longest
    few = _TOGETHER // (together * each_layer)
    if selector.rescore is not None or selector.merge is not None:
        few = min(few, _DECODED // each_layer)
    few = max(1, few)
    found = []
    for i in range(0, len(sequences), few):
        rows = torch.tensor(sequences[i : i + few], device=batch.seen.device)
        each = (
            _replan(
                selector,
                batch,
                slice(first, first + together),
                rows,
                budget[rows],
                None
                if merge_thresholds is None
                else merge_thresholds[first : first + together, rows],
            )
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
    merge_thresholds: Float[Tensor, "n D H"] | None,
) -> Float[Tensor, "K n D H"] | None:
    groups = _held(batch, layers, rows)
    scored, count = Scored.carried(groups), layers.stop - layers.start

    def by_layer(x: Tensor) -> Tensor:
        return x.view(count, len(rows), *x.shape[1:])

    stored = score = by_layer(scored.score)
    if selector.rescore is not None:
        score = _rescored(selector, batch, layers, rows, stored)
    view = PlanView(
        shape=batch.shape,
        first_layer=layers.start,
        score=score,
        position=by_layer(scored.position),
        tier=by_layer(scored.tier),
        length=batch.seen[rows],
        budget=budget,
        stored_score=None if selector.rescore is None else stored,
        page=batch.layout.page_tokens[..., layers, :],
    )
    plan, tier_thresholds = planned(selector, view, batch.window_size)
    parts = scored.split(plan.flatten(0, 1))
    table_rows = batch.table_rows(layers, rows).view(-1, batch.shape.kv_heads)
    # Pages with tokens that move to another tier are copied, one layer at a time.
    step = len(table_rows) if selector.tiers == 1 and merge_thresholds is None else len(rows)
    found = []
    for i in range(0, len(table_rows), step):
        some = slice(i, i + step)
        mine, kept = [group.of(some) for group in groups], [part[some] for part in parts]
        if merge_thresholds is not None:
            layer = i // len(rows)
            last = merge_thresholds[layer]
            found.append(_merge(selector, batch, layers.start + layer, rows, kept, last))
        restack(batch, table_rows[some].flatten(), mine, kept)
    return torch.stack(found).expand(selector.tiers, -1, -1, -1) if found else tier_thresholds


def _merge(
    selector: CompleteSelector,
    batch: Batch,
    layer: int,
    rows: Int[Tensor, " D"],
    plan: Sequence[UInt8[Tensor, "D H _"]],
    threshold: Float[Tensor, "D H"],
) -> Float[Tensor, "D H"]:
    """Merge the stored tokens of a layer that are dropped; return the thresholds of its heads."""
    where = slice(layer, layer + 1)
    groups = _held(batch, where, rows, frozenset({"keys", "values"}))
    length = batch.seen[rows]
    changed, threshold = merged(selector, batch, layer, groups, plan, length, threshold)
    for group, change in zip(groups, changed, strict=False):
        change.write(group, batch.table_rows(where, rows))
    return threshold


def _rescored(
    selector: CompleteSelector,
    batch: Batch,
    layers: slice,
    rows: Int[Tensor, " D"],
    stored: Float[Tensor, "n D H L"],
) -> Float[Tensor, "n D H L"]:
    """Score the tokens of layers for one plan, with the vectors of one layer at a time."""
    found = torch.zeros_like(stored)
    for i, layer in enumerate(range(layers.start, layers.stop)):
        groups = _held(batch, slice(layer, layer + 1), rows, selector.reads)
        each = rescored(selector, layer, batch.shape, Scored.carried(groups), batch.seen[rows])
        found[i, ..., : each.shape[-1]] = each  # empty slots are last, and others have more
    return found


def _held(
    batch: Batch,
    layers: slice,
    rows: Int[Tensor, " D"],
    reads: frozenset[VectorName] = frozenset(),
) -> list[Group]:
    """Return sequences' tokens in stores and the window, with rows grouped by layer.

    With the vectors in `reads`, except queries.
    """
    heads, groups = batch.shape.kv_heads, []
    table_rows = batch.table_rows(layers, rows)
    vectors = frozenset(name for name in reads if name != "queries")
    for tier, store in batch.held_stores:
        held = store.read(table_rows, vectors)
        assert held.position is not None  # pages of a selector store both
        assert held.score is not None
        position, score = grid(held.position, heads), grid(held.score, heads)
        key, value = (None if x is None else grid(x, heads) for x in (held.key, held.value))
        groups.append(
            Group(position, tier, fresh=False, store=store, score=score, key=key, value=value)
        )
    raw = batch.held_window
    if raw is not None:
        position = batch.by_head(raw.position[rows].repeat(layers.stop - layers.start, 1))
        carried = raw.scores_of(layers)[:, rows].flatten(0, 1) if raw.has_scores else None
        key = raw.keys_of(layers)[:, rows].flatten(0, 1) if "keys" in reads else None
        value = raw.values_of(layers)[:, rows].flatten(0, 1) if "values" in reads else None
        groups.append(Group(position, FRESH, fresh=False, score=carried, key=key, value=value))
    return groups
