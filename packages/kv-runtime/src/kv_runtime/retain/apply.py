"""Apply a layer's plan: evict and move stored tokens, and store new ones."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

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
        held = group.position >= 0
        down = held & (tier != group.tier) & (tier != DROP)
        if bool((down & (tier < group.tier)).any()):
            raise ValueError("the plan moves a stored token to an earlier tier")
        store = group.store
        if bool(down.any()):
            moved.append((store.copied(table_rows), flat(tier.masked_fill(~down, DROP))))
        store.compact(table_rows, flat(held & (tier == group.tier)))
    for copied, tier in moved:
        for index in range(batch.tiers.tiers):
            batch.tiers.append_stored(index, table_rows, copied, tier == index)


def enter(
    batch: Batch,
    now: Pass,
    layer: int,
    fresh: tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L Dv"]],
    scored: Scored,
    plan: Sequence[UInt8[Tensor, "B H _"]],
    changed: Sequence[Changed] = (),
    rows: Int[Tensor, " R"] | None = None,
) -> None:
    """Append tokens that leave the window to their tiers, and write the rest to the window.

    `changed` are the tokens of the groups, of the sequences `rows`, that have other vectors.
    """
    raw, (new_key, new_value) = batch.held_window, fresh
    keys = [new_key] if raw is None else [raw.keys(layer), new_key]
    values = [new_value] if raw is None else [raw.values(layer), new_value]
    scores = scored.split(scored.score)
    loose = [i for i, g in enumerate(scored.groups) if g.tier == FRESH]
    key, value = torch.cat(keys, 2), torch.cat(values, 2)
    if changed:
        assert rows is not None  # given with them
        first = 0
        for i, old in zip(loose, keys, strict=True):
            changed[i].put(key, value, rows, first)
            first += old.shape[2]
    key, value = flat(key), flat(value)
    tier = flat(torch.cat([plan[i] for i in loose], -1))
    score = flat(torch.cat([scores[i] for i in loose], -1))
    position = flat(torch.cat([scored.groups[i].position for i in loose], -1)).int()
    table_rows = batch.table_rows(slice(layer, layer + 1))
    for index in range(batch.tiers.tiers):
        batch.tiers.append(index, table_rows, key, value, tier == index, score, position)
    if batch.window is not None:
        batch.window.put(
            slice(layer, layer + 1),
            new_key[None],
            new_value[None],
            now.position,
            now.total,
            scores[-1][None],
        )
