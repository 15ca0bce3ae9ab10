"""Pages move together, so that what lies past them can be given back."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Together:
    """Which pages move where, and what all pages are called after that."""

    source: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    ids: Int[Tensor, " P1"]  # new id of each page, and of the scratch page; 0 for what is gone
    free: Int[Tensor, " m"]  # pages free after that, in order


def together(held: Int[Tensor, " n"], pages: int, fewer: int) -> Together:
    """Say how held pages fit into the first `fewer` of `pages` pages: only those beyond move.

    There are at most `fewer` of them, each named once. The host waits for the device.
    """
    ids = torch.arange(pages + 1, device=held.device)
    taken = torch.zeros(pages, dtype=torch.bool, device=held.device)
    taken[held] = True
    source = taken[fewer:].nonzero()[:, 0] + fewer
    gaps = (~taken[:fewer]).nonzero()[:, 0]
    # Held pages beyond are as many as gaps before, less those that stay free.
    target, free = gaps[: len(source)], gaps[len(source) :]
    ids[fewer:] = 0
    ids[source], ids[pages] = target, fewer
    return Together(source, target, ids, free)
