"""Scores of neighbouring positions, put together."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import pad


def pool(
    score: Float[Tensor, "B H L"],
    position: Int[Tensor, "B H L"],
    counts: Bool[Tensor, "B H L"],
    size: int,
    how: Literal["avg", "max"],
) -> Float[Tensor, "B H L"]:
    """Pool each token's score over those that count among the `size` positions around its own.

    Neighbours are told by position, not by place: what is left on the two sides of a gap stays
    apart. At the ends and beside gaps, a mean is over the tokens that are there. Two tokens with
    the same pool get the same number, to the last bit: equal scores stay equal, and a plan decides
    them by position and not by rounding.

    Args:
        score: one number per token.
        position: ascending in each head among the tokens that count.
        counts: tokens that are pooled; the others get 0 and give nothing.
        size: positions in a pool, odd.
        how: the mean or the greatest of the pool.
    """
    given = score.masked_fill(~counts, 0)
    if how == "max":
        return _greatest(given, position, counts, size // 2)
    return _mean(given, position, counts, size // 2)


def _greatest(
    given: Float[Tensor, "B H L"],
    position: Int[Tensor, "B H L"],
    counts: Bool[Tensor, "B H L"],
    radius: int,
) -> Float[Tensor, "B H L"]:
    found = given.clone()
    # Neighbours lie at most `radius` places off.
    for step in range(1, min(radius, given.shape[-1] - 1) + 1):
        before, after = slice(None, -step), slice(step, None)
        near = position[..., after] - position[..., before] <= radius
        near &= counts[..., after] & counts[..., before]
        for here, there in ((before, after), (after, before)):
            other = given[..., there].where(near, found[..., here])
            found[..., here] = torch.maximum(found[..., here], other)
    return found


def _mean(
    given: Float[Tensor, "B H L"],
    position: Int[Tensor, "B H L"],
    counts: Bool[Tensor, "B H L"],
    radius: int,
) -> Float[Tensor, "B H L"]:
    """The mean of each pool as a difference of running sums, which depends on its ends alone."""
    place = position.masked_fill(~counts, -1).cummax(-1).values
    first = torch.searchsorted(place, position - radius)
    past = torch.searchsorted(place, position + radius, right=True)
    mean = _between(given, first, past) / _between(counts, first, past).clamp(min=1)
    return mean.to(given.dtype).masked_fill(~counts, 0)


def _between(x: Tensor, first: Tensor, past: Tensor) -> Float64[Tensor, "B H L"]:
    sums = pad(x.double().cumsum(-1), (1, 0))
    return sums.gather(-1, past) - sums.gather(-1, first)
