"""The attention-mass pass: attention per token, from the log-sum-exp of the first pass."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention.blockwise import logits
from kv_attention.chosen import Choice
from kv_attention.gumbel import perturb
from kv_attention.parts import AttentionPart, block_sizes, reach
from kv_policy import Observe

_NEAR: Final = 256  # tokens per block of the new chunk


class Sums(NamedTuple):
    """The observed sums of a part of the tokens."""

    mass: Float[Tensor, "B H S"]
    seen: Int[Tensor, "B H S"]
    also: dict[str, Float[Tensor, "B H S"]]


def observe_part(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    lse: Float[Tensor, "B H G L"],
    part: AttentionPart,
    observe: Observe,
    softcap: float | None = None,
    choice: Choice | None = None,
) -> Sums:
    """Sum the attention received by each token of a part, and count the contributing queries.

    Args:
        q: the observed queries, already multiplied by the scale of the logits.
        position: their positions, or -1 for a query that does not count.
        lse: their log-sum-exp, over all parts, of the observed logits.
        part: the tokens.
        observe: the observation; `last` has been applied by `last_queries`.
        softcap: the bound of the logits, if any.
        choice: the tokens that each query attends to; others have the probability 0. None: all.
    """
    seen = q.new_zeros((*q.shape[:2], part.width), dtype=torch.int32)
    apart = q.shape[2:3] if observe.group == "max-of-sums" else ()
    sums = q.new_zeros((1 + len(observe.also), *q.shape[:2], *apart, part.width))
    size, tokens = block_sizes(q, q.shape[-1])
    # A decode step does not synchronize with the device.
    all_real = position.shape[1] > 1 and bool((position >= 0).all())
    # Blocks on the diagonal are computed in full and half masked, so small blocks waste less.
    spans = list(part.spans(min(tokens, _NEAR) if position.shape[1] > 1 else tokens))
    limits = reach(position, part, spans, observe.skip)
    for at, (first, settled) in zip(spans, limits, strict=True):
        keys = part.keys(at)
        if q.shape[2] * q.shape[3] > q.shape[4]:
            keys = keys.plain()
        for start in range(first // size * size, q.shape[3], size):
            chunk = slice(start, start + size)
            p = logits(q[..., chunk, :], keys, softcap)
            if observe.gumbel is not None:
                perturb(p, position[:, chunk], part.position(at), observe.gumbel)
            p = p.sub_(lse[..., chunk, None]).exp_()
            if choice is not None:
                p.masked_fill_(~choice[chunk].allows(part.position(at))[:, :, None], 0)
            counts = None
            if start < settled:
                counts = _counts(position[:, chunk], part, at, observe, all_real)
            if counts is None:
                seen[..., at] += p.shape[3]
            else:
                counts = counts.expand(*p.shape[:2], *p.shape[3:])
                p.masked_fill_(~counts[:, :, None], 0)
                seen[..., at] += counts.sum(dim=2)
            for i, each in enumerate(_terms(p, position[:, chunk], observe)):
                sums[i][..., at] += _summed(each, observe)
    if observe.group == "mean":
        sums /= q.shape[2]  # at the end, because counts of `above` are integers until here
    mass, *also = sums.amax(dim=3) if apart else sums
    return Sums(mass, seen, dict(zip(sorted(observe.also), also, strict=True)))


def _terms(
    p: Float[Tensor, "B H G L S"], position: Int[Tensor, "B L"], observe: Observe
) -> Iterator[Float[Tensor, "B H G L S"]]:
    """Yield the summands: the first term of the observation, then its `also`."""
    if observe.above is not None:
        even = (position + 1).clamp(min=1).to(p.dtype).reciprocal()
        yield (p > observe.above * even[:, None, None, :, None]).to(p.dtype)
    else:
        yield p.square() if observe.power == 2 else p
    for name in sorted(observe.also):
        yield p.square() if name == "squares" else torch.special.entr(p)


def _counts(
    position: Int[Tensor, "B L"], part: AttentionPart, at: slice, observe: Observe, all_real: bool
) -> Bool[Tensor, "B _ _ S"] | None:
    """Return which queries count for which tokens; None: all for all."""
    query = position[:, None, :, None]
    counts = part.visible(at, position)
    if not all_real:
        real = query >= 0
        counts = real.expand(-1, -1, -1, at.stop - at.start) if counts is None else counts & real
    if observe.skip > part.before:
        far = query - part.position(at)[:, :, None] >= observe.skip
        counts = far if counts is None else counts & far
    return counts


def _summed(p: Float[Tensor, "B H G L S"], observe: Observe) -> Float[Tensor, "B H *G S"]:
    if observe.group == "max-of-sums":
        return p.sum(dim=3)
    if observe.group == "max":
        return p.amax(dim=2).sum(dim=2)
    return p.sum(dim=(2, 3))


def last_queries(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    lse: Float[Tensor, "B H G L"],
    last: int | None,
) -> tuple[Float[Tensor, "B H G w D"], Int[Tensor, "B w"], Float[Tensor, "B H G w"]]:
    """Select the last real queries of each sequence; position -1 if it has fewer."""
    place = last_columns(position, last)
    if place is None:
        return q, position, lse
    index = place.clamp(min=0)
    chosen = position.gather(1, index).where(place >= 0, -1)
    index = index[:, None, None].expand(*q.shape[:3], -1)
    rows = q.gather(3, index[..., None].expand(*index.shape, q.shape[-1]))
    return rows, chosen, lse.gather(3, index)


def last_columns(position: Int[Tensor, "B L"], last: int | None) -> Int[Tensor, "B w"] | None:
    """Return the columns of the last real queries, -1 where there are fewer; None: all."""
    length = position.shape[1]
    if last is None or last >= length:
        return None
    place = torch.arange(length, device=position.device).where(position >= 0, -1)
    return place.topk(last, dim=1).values
