"""The float64 reference of the backends: attention by definition, one table row at a time."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention.gumbel import noise
from kv_attention.inputs import AttentionInputs
from kv_attention.tokens import Attended, DenseTokens
from kv_policy import Observe, PagedTokens


class ReferenceTokens(NamedTuple):
    """The tokens of one table row in one part; stored ones precede every query."""

    key: Float[Tensor, "S D"]
    value: Float[Tensor, "S Dv"]
    position: Int[Tensor, " S"]  # -1 if unknown, or the slot is empty
    stored: Bool[Tensor, " S"]


def attend(inputs: AttentionInputs) -> Attended:
    """Compute attention separately for every observation."""
    return Attended.of(_attend(inputs, what) for what in inputs.observations)


def _attend(inputs: AttentionInputs, observe: Observe) -> Attended:
    """Decode the tokens of one table row after another, and apply a plain softmax over them.

    Slow on purpose; it shares no code with the backends that are tested against it. It holds one
    number per query head, query and token of a table row.
    """
    q, position, pages, dense = inputs.q, inputs.position, inputs.pages, inputs.dense
    sequences, heads = q.shape[:2]
    widths = [int(p.length.max()) if p.longest is None else p.longest for p in pages] + [
        tokens.key.shape[2] for tokens in dense
    ]
    out = q.new_zeros((*q.shape[:-1], inputs.value_dim), dtype=torch.float64)
    kinds = (None, *sorted(observe.also))
    sums = [out.new_zeros((len(kinds), sequences, heads, width)) for width in widths]
    seen = [torch.zeros_like(m[0], dtype=torch.int32) for m in sums]
    for b in range(sequences):
        for h in range(heads):
            parts = [
                *(paged(p, at, b, h) for p, at in zip(pages, inputs.page_positions, strict=True)),
                *(plain(tokens, b, h) for tokens in dense),
            ]
            if not parts:
                continue
            every = ReferenceTokens(*(torch.cat(field) for field in zip(*parts, strict=True)))
            seen_by = visible(position[b], every)
            sees = seen_by
            if inputs.chosen is not None:
                sees = chosen_of(inputs.chosen[b], seen_by, every.position)
            x = q[b, h].double() @ every.key.mT * inputs.scale
            if inputs.softcap is not None:
                x = inputs.softcap * (x / inputs.softcap).tanh()
            sinks = None if inputs.sinks is None else inputs.sinks[h].double()
            p = softmax(x, sees, sinks)
            out[b, h] = p @ every.value
            counts = seen_by & watched(position[b], observe.last)[:, None]
            if observe.skip:
                counts &= position[b][:, None] - every.position >= observe.skip
            if observe.gumbel is not None:
                # A sink is no token that noise could choose, but a logit like others otherwise.
                pairs = noise(position[b][:, None], every.position)
                sinks = None if sinks is None else sinks / observe.gumbel
                p = softmax((x + pairs) / observe.gumbel, sees, sinks)
            terms = [term(p, position[b], observe, kind) for kind in kinds]
            got = torch.stack([grouped(each, counts, observe) for each in terms])
            sizes = [len(part.key) for part in parts]
            shares = torch.split(got, sizes, dim=1), torch.split(counts.sum(dim=0), sizes)
            for i, (share, count) in enumerate(zip(*shares, strict=True)):
                sums[i][:, b, h, : len(count)], seen[i][b, h, : len(count)] = share, count
    if observe.last == 0:
        return Attended(out.to(q.dtype))
    dtype = torch.promote_types(q.dtype, torch.float32)
    cast = [part.to(dtype) for part in sums]
    also = tuple(dict(zip(sorted(observe.also), part[1:], strict=True)) for part in cast)
    return Attended(out.to(q.dtype), tuple(part[0] for part in cast), tuple(seen), also)


def paged(
    pages: PagedTokens, positions: Int[Tensor, "B H _"] | None, b: int, h: int
) -> ReferenceTokens:
    """Decode one table row of a tier."""
    layout, count = pages.layout, int(pages.length[b, h])
    form = layout.format
    row = pages.table[b, h].flip(0) if pages.reverse else pages.table[b, h]
    table = row[: -(-count // layout.tokens)].long()
    rows = [
        pages.data[table, offset : offset + rows * size].reshape(-1, size)
        for offset, rows, size in layout.segments
    ]
    split = len(form.key.parts)
    key = form.key.decode(torch.cat(rows[:split], dim=1))
    value = form.value.decode(torch.cat(rows[form.value_parts], dim=1))
    place = torch.full((count,), -1, device=table.device)
    if positions is not None:
        place = positions[b, h, :count]
    held = torch.ones_like(place, dtype=torch.bool)
    if pages.holes:
        start = layout.position_offset
        stored = pages.data[table, start : start + 4 * layout.tokens].reshape(-1, 4)
        held = stored.view(torch.int32)[:count, 0] >= 0
    return ReferenceTokens(
        key.reshape(-1, form.key.dim)[:count].double().masked_fill(~held[:, None], 0),
        value.reshape(-1, form.value.dim)[:count].double().masked_fill(~held[:, None], 0),
        place.masked_fill(~held, -1),
        held,
    )


def plain(tokens: DenseTokens, b: int, h: int) -> ReferenceTokens:
    """Return one table row of dense tensors; empty slots become zeros."""
    position = tokens.position[b]
    empty = (position < 0)[:, None]
    return ReferenceTokens(
        tokens.key[b, h].double().masked_fill(empty, 0),
        tokens.value[b, h].double().masked_fill(empty, 0),
        position,
        torch.zeros_like(position, dtype=torch.bool),
    )


def visible(position: Int[Tensor, " L"], tokens: ReferenceTokens) -> Bool[Tensor, "L S"]:
    """Return the mask of tokens that a query sees; a padding query sees none."""
    query = position[:, None]
    before = (tokens.position >= 0) & (tokens.position <= query)
    return (query >= 0) & (tokens.stored | before)


def chosen_of(
    chosen: Bool[Tensor, "L P"], sees: Bool[Tensor, "L S"], position: Int[Tensor, " S"]
) -> Bool[Tensor, "L S"]:
    """Return the tokens that a query attends to: the chosen ones that it sees, or else all."""
    found = sees.clone()
    for token, place in enumerate(position.tolist()):
        known = 0 <= place < chosen.shape[1]
        found[:, token] &= chosen[:, place] if known else torch.zeros_like(chosen[:, 0])
    return torch.where(found.any(1, keepdim=True), found, sees)


def softmax(
    logits: Float[Tensor, "G L S"], visible: Bool[Tensor, "L S"], sinks: Float[Tensor, " G"] | None
) -> Float[Tensor, "G L S"]:
    """Return the softmax of a query's visible logits and its sink, if any, without the sink's.

    All 0 if no token is visible.
    """
    x = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        x = torch.cat((x, sinks[:, None, None].expand(*x.shape[:2], 1)), dim=-1)
    p = x.softmax(dim=-1)[..., : logits.shape[-1]]
    return p.masked_fill(~visible, 0)


def watched(position: Int[Tensor, " L"], last: int | None) -> Bool[Tensor, " L"]:
    """Mark the last real queries of a sequence."""
    real = position >= 0
    if last is None:
        return real
    later = real.long().flip(0).cumsum(0).flip(0)  # real queries from this one on
    return real & (later <= last)


def term(
    p: Float[Tensor, "G L S"], position: Int[Tensor, " L"], observe: Observe, kind: str | None
) -> Float[Tensor, "G L S"]:
    """Return the summand: the first term of `observe`, or one of its `also`."""
    if kind == "entropy":
        return torch.where(p > 0, -p * p.log(), 0)
    if kind == "squares":
        return p**2
    if observe.above is not None:
        return (p > observe.above / (position[:, None] + 1)).double()
    return p**observe.power


def grouped(
    p: Float[Tensor, "G L S"], counts: Bool[Tensor, "L S"], observe: Observe
) -> Float[Tensor, " S"]:
    """Sum over the queries that count, and reduce over the query heads of a KV head."""
    p = p * counts
    if observe.group == "max-of-sums":
        return p.sum(dim=1).amax(dim=0)
    if observe.group == "max":
        return p.amax(dim=0).sum(dim=0)
    total = p.sum(dim=(0, 1))
    return total if observe.group == "sum" else total / len(p)
