"""Apply a layer's plan: evict and move stored tokens, and store new ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import pad

from kv_policy import DROP, FRESH
from kv_runtime.batch import Batch, Pass, flat
from kv_runtime.retain.merging import Changed
from kv_runtime.retain.planning import Group, Scored


def restack(
    batch: Batch,
    table_rows: Int[Tensor, " S"],
    groups: Sequence[Group],
    plan: Sequence[UInt8[Tensor, "B H _"]],
) -> None:
    """Evict and downgrade tokens of heads; empty pages return to the pool.

    The pages of heads with downgraded tokens are copied, so pass few heads in that case.

    Raises:
        ValueError: the plan moves a stored token to an earlier tier.
    """
    moved = []
    for group, tier in zip(groups, plan, strict=True):
        if group.store is None:
            continue
        store, held = group.store, group.position >= 0
        if batch.tiers.tiers > 1:
            down = held & (tier != group.tier) & (tier != DROP)
            if bool((down & (tier < group.tier)).any()):
                raise ValueError("the plan moves a stored token to an earlier tier")
            if bool(down.any()):
                moved.append((store.copied(table_rows), flat(tier.masked_fill(~down, DROP))))
        store.compact(table_rows, flat(held & (tier == group.tier)))
    for copied, tier in moved:
        for index in range(batch.tiers.tiers):
            batch.tiers.append_stored(index, table_rows, copied, tier == index)


@dataclass(frozen=True)
class Entry:
    """New tokens of layers, with the scores and tiers of all their tokens, by group.

    B indexes sequences, grouped by layer. `changed` are the tokens of the groups of a single layer,
    of the sequences `rows`, that have other vectors.
    """

    key: Float[Tensor, "B H L D"]
    value: Float[Tensor, "B H L Dv"]
    scored: Scored
    plan: Sequence[UInt8[Tensor, "B H _"]]
    changed: Sequence[Changed] = ()
    rows: Int[Tensor, " R"] | None = None


def restack_layers(batch: Batch, layers: slice, entries: Sequence[Entry]) -> None:
    """Evict and downgrade the stored tokens of layers, as `restack` of each layer."""
    groups, plan = [], []
    for i, group in enumerate(entries[0].scored.groups):
        if group.store is not None:
            position = _wide([entry.scored.groups[i].position for entry in entries], -1)
            groups.append(Group(position, group.tier, group.fresh, group.store))
            plan.append(_wide([entry.plan[i] for entry in entries], DROP))
    restack(batch, batch.table_rows(layers), groups, plan)


def _wide(each: Sequence[Tensor], fill: int) -> Tensor:
    """Concatenate the rows of layers, which may have different numbers of slots."""
    width = max(x.shape[-1] for x in each)
    return torch.cat([pad(x, (0, width - x.shape[-1]), value=fill) for x in each])


def enter(batch: Batch, now: Pass, layers: slice, entries: Sequence[Entry]) -> None:
    """Append tokens that leave the window to their tiers, and write the rest to the window.

    Args:
        batch: the stored tokens.
        now: the pass that brings new ones.
        layers: the layers.
        entries: their new tokens, in one entry or in one for each layer.
    """
    each = (layers.stop - layers.start) // len(entries)
    spans = [slice(first, first + each) for first in range(layers.start, layers.stop, each)]
    loose = [_loose(batch, *pair) for pair in zip(spans, entries, strict=True)]
    key, value, tier, score, position = (
        rows[0] if len(rows) == 1 else torch.cat(rows) for rows in zip(*loose, strict=True)
    )
    table_rows = batch.table_rows(layers)
    for index in range(batch.tiers.tiers):
        batch.tiers.append(index, table_rows, key, value, tier == index, score, position)
    if batch.window is None:
        return
    for span, entry in zip(spans, entries, strict=True):
        new = entry.key, entry.value, entry.scored.split(entry.scored.score)[-1]
        by_layer = zip(*(x.unflatten(0, (each, -1)) for x in new), strict=True)
        for layer, (key, value, score) in enumerate(by_layer, span.start):
            batch.window.put(
                slice(layer, layer + 1),
                key[None],
                value[None],
                now.position,
                now.total,
                score[None],
            )


def _loose(batch: Batch, layers: slice, entry: Entry) -> tuple[Tensor, ...]:
    """Return the tokens of layers that are in no page yet, one row per head.

    They are keys, values, tiers, scores and positions.
    """
    raw, scored = batch.held_window, entry.scored
    keys, values = [entry.key], [entry.value]
    if raw is not None:
        keys = [raw.keys_of(layers).flatten(0, 1), entry.key]
        values = [raw.values_of(layers).flatten(0, 1), entry.value]
    copied = raw is not None or len(entry.changed) > 0  # what changes is overwritten in the copy
    key, value = (torch.cat(x, 2) if copied else x[0] for x in (keys, values))
    scores = scored.split(scored.score)
    loose = [i for i, g in enumerate(scored.groups) if g.tier == FRESH]
    if entry.changed:
        assert entry.rows is not None  # given with them
        first = 0
        for i, old in zip(loose, keys, strict=True):
            entry.changed[i].put(key, value, entry.rows, first)
            first += old.shape[2]
    position = torch.cat([scored.groups[i].position for i in loose], -1).int()
    tier, score = (torch.cat([x[i] for i in loose], -1) for x in (entry.plan, scores))
    return tuple(flat(x) for x in (key, value, tier, score, position))
