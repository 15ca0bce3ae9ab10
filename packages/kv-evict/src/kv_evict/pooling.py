"""Pooling of scores over neighbouring positions."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import max_pool1d, pad


def pool(
    score: Float[Tensor, "B H L"],
    position: Int[Tensor, "B H L"],
    counts: Bool[Tensor, "B H L"],
    size: int,
    how: Literal["avg", "max"],
) -> Float[Tensor, "B H L"]:
    """Pool each token's score over the counted tokens among the `size` positions around it.

    Neighbours are defined by position, not by slot: tokens on two sides of a gap are not adjacent.
    At the ends and beside gaps, a mean is over the present tokens only. Two tokens with the same
    pool get bitwise equal results: ties stay ties, and a plan breaks them by position and not by
    rounding.

    Args:
        score: one number per token.
        position: ascending in each head among the counted tokens.
        counts: tokens that are pooled; the others get 0 and contribute nothing.
        size: positions per pool, odd.
        how: mean or maximum.
    """
    given = score.masked_fill(~counts, 0)
    if how == "max":
        # The number of positions would be read from a device.
        greatest = _greatest_by_position if given.device.type == "cpu" else _greatest
        return greatest(given, position, counts, size // 2)
    return _mean(given, position, counts, size // 2)


def expect_odd(name: str, size: int) -> None:
    """Raise unless a pool has a middle.

    Args:
        name: the method, which begins the message.
        size: positions per pool.

    Raises:
        ValueError: the size is even.
    """
    if size % 2 == 0:
        raise ValueError(
            f"{name}: pool={size} has no middle; use an odd number, such as {size + 1}"
        )


def _greatest_by_position(
    given: Float[Tensor, "B H L"],
    position: Int[Tensor, "B H L"],
    counts: Bool[Tensor, "B H L"],
    radius: int,
) -> Float[Tensor, "B H L"]:
    """Return the maximum of each pool, where tokens lie by their positions."""
    place = position.masked_fill(~counts, -1) + 1  # the first place is of tokens not counted
    places = int(place.max()) + 1 if place.numel() else 1
    known = given.new_full((*given.shape[:-1], places), -torch.inf).scatter_(-1, place, given)
    found = max_pool1d(known[..., 1:], 2 * radius + 1, 1, radius) if places > 1 else known
    return found.gather(-1, place.sub_(1).clamp_(min=0)).masked_fill_(~counts, 0)


def _greatest(
    given: Float[Tensor, "B H L"],
    position: Int[Tensor, "B H L"],
    counts: Bool[Tensor, "B H L"],
    radius: int,
) -> Float[Tensor, "B H L"]:
    found = given.clone()
    # Neighbours are at most `radius` slots apart.
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
    """Return the mean of each pool as a difference of prefix sums at its ends."""
    place = position.masked_fill(~counts, -1).cummax(-1).values
    first = torch.searchsorted(place, position - radius)
    past = torch.searchsorted(place, position + radius, right=True)
    mean = _between(given, first, past) / _between(counts, first, past).clamp(min=1)
    return mean.to(given.dtype).masked_fill(~counts, 0)


def _between(x: Tensor, first: Tensor, past: Tensor) -> Float64[Tensor, "B H L"]:
    sums = pad(x.double().cumsum(-1), (1, 0))
    return sums.gather(-1, past) - sums.gather(-1, first)
