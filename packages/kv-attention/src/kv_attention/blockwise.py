"""Unfused attention over a part of the tokens, in blocks of bounded size."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention.chosen import Choice
from kv_attention.partial import Partial
from kv_attention.parts import AttentionPart, block_sizes
from kv_attention.vectors import Vectors


def blockwise(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    part: AttentionPart,
    value_dim: int,
    softcap: float | None = None,
    choice: Choice | None = None,
) -> Partial:
    """Compute attention over a part, block by block; each block of tokens is read once.

    Args:
        q: queries, already multiplied by the scale of the logits.
        position: positions of the queries.
        part: the tokens.
        value_dim: Dv.
        softcap: the bound of the logits, if any.
        choice: the tokens that each query attends to, of those that it sees; None: all.
    """
    size, tokens = block_sizes(q, value_dim)
    chunks = [slice(start, start + size) for start in range(0, q.shape[3], size)]
    totals: list[Partial] = []
    for at in part.spans(tokens):
        keys, values = part.both(at)
        if q.shape[2] * q.shape[3] > q.shape[4]:
            keys, values = keys.plain(), values.plain()
        found = []
        for chunk in chunks:
            seen = part.visible(at, position[:, chunk])
            if choice is not None:
                seen = choice[chunk].among(seen, part.position(at))
            found.append(_block(q[..., chunk, :], keys, values, seen, softcap))
        totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    if len(totals) == 1:
        return totals[0]
    if not totals:
        return Partial.empty(q, value_dim)
    return Partial(torch.cat([t.out for t in totals], 3), torch.cat([t.lse for t in totals], 3))


def _block(
    q: Float[Tensor, "B H G L D"],
    keys: Vectors,
    values: Vectors,
    visible: Bool[Tensor, "B _ _ S"] | None,
    softcap: float | None,
) -> Partial:
    x = logits(q, keys, softcap)
    if visible is not None:
        x.masked_fill_(~visible[:, :, None], -torch.inf)
    top = x.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
    weights = x.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    # The largest weight is 1, so the total is below 1 only for a query that sees no token.
    out = values.weigh(weights.flatten(0, 1).flatten(1, 2)).view(*q.shape[:-1], -1)
    return Partial(out.div_(total.clamp(min=1)), (top + total.log()).squeeze(-1))


def logits(
    q: Float[Tensor, "B H G L D"], keys: Vectors, softcap: float | None
) -> Float[Tensor, "B H G L S"]:
    """Return the products of scaled queries and keys, in a new tensor, within the bound if any."""
    rows = q.flatten(0, 1).flatten(1, 2)
    x = keys.dot(rows).view(*q.shape[:-1], -1)
    return x if softcap is None else x.div_(softcap).tanh_().mul_(softcap)
