"""Merge the vectors of tokens that a plan drops into kept ones, before they are evicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_policy import DROP, CompleteSelector, Merge, MergeView
from kv_runtime.batch import Batch, flat, grid
from kv_runtime.retain.answers import expect_merge
from kv_runtime.retain.planning import Group, Scored


@dataclass(frozen=True)
class Changed:
    """Kept tokens of a group with other vectors than before: n of them, row by row."""

    some: Bool[Tensor, "B H S"]
    key: Float[Tensor, "n D"] | None  # None: the keys stay
    value: Float[Tensor, "n Dv"]

    def write(self, group: Group, table_rows: Int[Tensor, " S"]) -> None:
        """Encode the vectors in the pages of the group's store, if it has one."""
        if group.store is not None:
            group.store.rewrite(table_rows, flat(self.some), self.key, self.value)

    def put(
        self,
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        rows: Int[Tensor, " R"],
        first: int,
    ) -> None:
        """Overwrite the vectors of the tokens of sequences `rows` in place, from a place on."""
        row, head, slot = self.some.nonzero().unbind(1)
        where = rows[row], head, first + slot
        if self.key is not None:
            key[where] = self.key.to(key.dtype)
        value[where] = self.value.to(value.dtype)


def with_vectors(
    batch: Batch,
    layer: int,
    groups: Sequence[Group],
    rows: Int[Tensor, " D"],
    loose: Sequence[tuple[Float[Tensor, "D H _ K"], Float[Tensor, "D H _ V"]]],
) -> list[Group]:
    """Return some sequences of a layer's groups with the vectors that are stored of their tokens.

    Args:
        batch: the batch.
        layer: the layer of the groups.
        groups: tokens of all sequences.
        rows: D sequences.
        loose: key and value of the groups without a store, in order.
    """
    table_rows = batch.table_rows(slice(layer, layer + 1), rows)
    rest, found = iter(loose), []
    for group in groups:
        mine = group.of(rows)
        if group.store is None:
            key, value = next(rest)
        else:
            read = group.store.read(table_rows, frozenset({"keys", "values"}))
            assert read.key is not None  # both are requested
            assert read.value is not None
            key, value = (grid(x, batch.shape.kv_heads) for x in (read.key, read.value))
            mine = _cut(mine, key.shape[2])
        found.append(replace(mine, key=key, value=value))
    return found


def _cut(group: Group, slots: int) -> Group:
    """Return the first slots; the others are empty in all rows."""
    score = None if group.score is None else group.score[..., :slots]
    return replace(group, position=group.position[..., :slots], score=score)


def merged(
    selector: CompleteSelector,
    batch: Batch,
    layer: int,
    groups: Sequence[Group],
    plan: Sequence[UInt8[Tensor, "D H _"]],
    length: Int[Tensor, " D"],
    threshold: Float[Tensor, "D H"],
) -> tuple[list[Changed], Float[Tensor, "D H"]]:
    """Return the changed tokens of each group of a layer, and the thresholds of its heads.

    Args:
        selector: a selector that merges.
        batch: the batch.
        layer: the layer.
        groups: the tokens of the planned sequences, with vectors.
        plan: the tiers of each group; more slots than a group has are empty.
        length: tokens seen by each sequence.
        threshold: of the last merge.

    Returns:
        The changed tokens are an empty list if nothing is dropped.

    Raises:
        ValueError: the selector returns what is no merge.
    """
    assert selector.merge is not None
    plan = [part[..., : g.position.shape[-1]] for part, g in zip(plan, groups, strict=True)]
    raw = (length - batch.window_size if batch.window_size else length)[:, None, None]
    outside = [g.position.masked_fill(g.position >= raw, -1) for g in groups]
    gone = [(p >= 0) & (part == DROP) for p, part in zip(outside, plan, strict=True)]
    if not any(bool(x.any()) for x in gone):
        return [], threshold
    hidden = [replace(g, position=p) for g, p in zip(groups, outside, strict=True)]
    scored = Scored.carried(hidden)
    dropped = scored.joined(gone)
    view = MergeView(
        layer=torch.full_like(length, layer),
        shape=batch.shape,
        position=scored.position,
        kept=(scored.position >= 0) & ~dropped,
        score=scored.score,
        length=length,
        threshold=threshold,
        keys=scored.vectors("keys"),
        values=scored.vectors("values"),
    )
    answer = expect_merge(selector, view, selector.merge(view))
    weight = answer.weight.float() * dropped[..., None]
    some = _changed(view, answer, weight)
    value = _combined(view.values, answer, weight)
    key = _combined(view.keys, answer, weight) if answer.keys else None
    found = [
        Changed(mask, None if k is None else k[mask], v[mask])
        for mask, k, v in zip(
            scored.split(some),
            [None] * len(groups) if key is None else scored.split_vectors(key),
            scored.split_vectors(value),
            strict=True,
        )
    ]
    if answer.threshold is not None:
        threshold = answer.threshold.to(threshold.dtype).where(dropped.any(-1), threshold)
    return found, threshold


def _combined(
    x: Float[Tensor, "B H L D"], answer: Merge, weight: Float[Tensor, "B H L M"]
) -> Float[Tensor, "B H L D"]:
    """Return the vectors of kept tokens with those that are merged into them."""
    out = x.clone() if answer.own is None else x * answer.own.float()[..., None]
    for target, share in zip(answer.target.unbind(-1), weight.unbind(-1), strict=True):
        into = (share != 0)[..., None]
        place = target.long()[..., None].where(into, 0).expand_as(x)
        out.scatter_add_(2, place, (share[..., None] * x).where(into, 0))  # 0 if x is infinite
    return out


def _changed(
    view: MergeView, answer: Merge, weight: Float[Tensor, "B H L M"]
) -> Bool[Tensor, "B H L"]:
    """Return which kept tokens have other vectors: the others keep their bytes."""
    got = torch.zeros_like(view.position)
    for target, share in zip(answer.target.unbind(-1), weight.unbind(-1), strict=True):
        into = share != 0
        got.scatter_add_(2, target.long().where(into, 0), into.long())
    moved = got > 0
    if answer.own is not None:
        moved |= answer.own != 1
    return view.kept & moved & view.dropped.any(-1, keepdim=True)
