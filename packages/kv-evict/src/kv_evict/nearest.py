"""The kept token whose key is most like that of a dropped one."""

from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

_TOGETHER: Final = 1 << 22  # cosines computed at once, which bounds the memory


def first_kept(kept: Bool[Tensor, "B H L"]) -> Int[Tensor, "B H K"]:
    """Return the indices of kept tokens in order, padded with others to the head with the most."""
    most = max(1, int(kept.sum(-1).max()))
    return (~kept).long().argsort(dim=-1, stable=True)[..., :most]


def nearest(
    keys: Float[Tensor, "B H L D"], kept: Bool[Tensor, "B H L"]
) -> tuple[Float[Tensor, "B H L"], Int[Tensor, "B H L"]]:
    """Return the largest cosine of each key and a kept key of its head, and the index of that one.

    The first of equal ones counts; the cosine is -inf where a head keeps no token.
    """
    unit, place = normalize(keys, dim=-1), first_kept(kept)
    there = kept.gather(-1, place)[:, :, None]
    others = unit.gather(2, place[..., None].expand(*place.shape, keys.shape[-1])).mT
    rows = max(1, _TOGETHER // max(1, place.numel()))
    found, index = [], []
    for first in range(0, keys.shape[2], rows):
        cosine = (unit[:, :, first : first + rows] @ others).masked_fill(~there, -torch.inf)
        largest = cosine.max(-1)
        found.append(largest.values)
        index.append(place.gather(-1, largest.indices))
    return torch.cat(found, -1), torch.cat(index, -1)
