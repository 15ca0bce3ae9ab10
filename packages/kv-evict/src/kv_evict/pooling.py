"""Scores of neighbouring positions, put together."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def pool(
    score: Float[Tensor, "B H L"],
    position: Int[Tensor, "B H L"],
    counts: Bool[Tensor, "B H L"],
    size: int,
    how: Literal["avg", "max"],
) -> Float[Tensor, "B H L"]:
    """Pool each token's score over those that count among the `size` positions around its own.

    Neighbours are told by position, not by place: what is left on the two sides of a gap stays
    apart. At the ends and beside gaps, a mean is over the tokens that are there.

    Args:
        score: one number per token.
        position: ascending in each head among the tokens that count.
        counts: tokens that are pooled; the others get 0 and give nothing.
        size: positions in a pool, odd.
        how: the mean or the greatest of the pool.
    """
    radius, places = size // 2, score.shape[-1]
    given = score.masked_fill(~counts, 0)
    total, number = given.clone(), counts.to(score.dtype)
    for step in range(1, min(radius, places - 1) + 1):  # neighbours lie at most `radius` places off
        before, after = slice(None, -step), slice(step, None)
        near = position[..., after] - position[..., before] <= radius
        near &= counts[..., after] & counts[..., before]
        for here, there in ((before, after), (after, before)):
            if how == "avg":
                total[..., here] += given[..., there] * near
                number[..., here] += near
            else:
                other = given[..., there].where(near, total[..., here])
                total[..., here] = torch.maximum(total[..., here], other)
    return total / number.clamp(min=1) if how == "avg" else total
