"""Attention in plain torch, in blocks: no decompressed copy of a layer is ever held."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, reduce
from operator import add
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import flash
from kv_attention.blockwise import blockwise
from kv_attention.gumbel import perturbed_lse
from kv_attention.observe import last_queries, observe_part
from kv_attention.partial import Partial
from kv_attention.parts import AttentionPart, DensePart, PagedPart
from kv_attention.tokens import Attended, DenseTokens
from kv_policy import Observe, PagedTokens


class Forward(NamedTuple):
    """A pass over all parts, before anything is observed of it.

    `lse` is the log-sum-exp of each query's logits over all parts, in the dtype of the sums.
    """

    q: Float[Tensor, "B H G L D"]
    position: Int[Tensor, "B L"]
    scale: float
    parts: Sequence[AttentionPart]
    out: Float[Tensor, "B H G L Dv"]
    lse: Float[Tensor, "B H G L"]


def attend(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
    scale: float,
    observe: Observe,
    page_positions: Sequence[Int[Tensor, "B H _"] | None],
    others: Sequence[Observe],
) -> Attended:
    """Attend part by part and add up; then look back at what was to be observed.

    Logits and sums are in float32, or in float64 if the queries are. A temporary holds about
    `parts.ROOM` numbers; the fresh chunk goes through torch's own fused kernel where that fits.
    """
    done = forward(q, position, pages, dense, value_dim, scale, page_positions)
    first, *more = (look_back(done, what) for what in (observe, *others))
    return replace(first, others=tuple(more))


def forward(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
    scale: float,
    page_positions: Sequence[Int[Tensor, "B H _"] | None],
    stored: Partial | None = None,
) -> Forward:
    """Attend part by part and add up; the output is in the dtype of the queries.

    `stored` is attention over all pages, where another way to it was taken.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    parts = parts_of(q, pages, dense, page_positions)

    @cache
    def scaled() -> Tensor:  # where it is asked for: a prompt alone needs no copy of its queries
        return q.to(dtype) * scale

    left = parts if stored is None else parts[len(pages) :]
    partials = [_partial(q, scaled, position, part, value_dim, scale) for part in left]
    partials += [] if stored is None else [stored]
    total = reduce(add, partials) if partials else Partial.empty(q, value_dim)
    real = position >= 0
    # A decode step never asks the device: there, nothing is cheaper than a look.
    if position.shape[1] == 1 or not real.all():
        total = total.only(real)
    return Forward(q, position, scale, parts, total.out.to(q.dtype), total.lse)


def parts_of(
    q: Float[Tensor, "B H G L D"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    page_positions: Sequence[Int[Tensor, "B H _"] | None],
) -> list[AttentionPart]:
    """Give all parts as they are read for these queries, pages first."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return [
        *(PagedPart.of(p, dtype, at) for p, at in zip(pages, page_positions, strict=True)),
        *(DensePart.of(tokens, dtype) for tokens in dense),
    ]


def look_back(done: Forward, what: Observe) -> Attended:
    """Give the output, and what is to be observed of each part."""
    if what.last == 0:
        return Attended(done.out)
    rows, places, lse = last_queries(done.q, done.position, done.lse, what.last)
    rows = rows.to(lse.dtype) * done.scale
    if what.gumbel is not None:
        lse = perturbed_lse(rows, places, done.parts, what.gumbel)
    found = [observe_part(rows, places, lse, part, what) for part in done.parts]
    return Attended(
        done.out,
        tuple(sums.mass for sums in found),
        tuple(sums.seen for sums in found),
        tuple(sums.also for sums in found),
    )


def _partial(
    q: Float[Tensor, "B H G L D"],
    scaled: Callable[[], Float[Tensor, "B H G L D"]],
    position: Int[Tensor, "B L"],
    part: AttentionPart,
    value_dim: int,
    scale: float,
) -> Partial:
    if isinstance(part, DensePart) and flash.is_causal(q, position, part):
        return flash.causal(q, part, scale)
    if isinstance(part, PagedPart) and flash.is_worth_it(q, value_dim):
        return flash.stored(scaled(), position, part)
    return blockwise(scaled(), position, part, value_dim)
