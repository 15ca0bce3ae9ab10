"""The new columns of a forward pass, as the model's mask has them."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PassColumns:
    """Which new columns hold a token, and how far their queries see.

    Attributes:
        valid: which columns hold a token; None: all.
        reach: the last new column that each query sees, in models whose prefix or pictures have
            tokens that see each other; None: its own.
        chosen: which of all columns, those of the pass last, each query attends to, if the layer
            selects some; None: all that it sees. The others apply, too.
    """

    valid: Bool[Tensor, "B L"] | None = None
    reach: Int[Tensor, "B L"] | None = None
    chosen: Bool[Tensor, "B Lq T"] | None = None


ALL: Final = PassColumns()


def columns_of(indices: Int[Tensor, "B Lq k"], columns: int) -> Bool[Tensor, "B Lq T"]:
    """Return which columns each query chooses, by the indices of these; others are ignored."""
    known = (indices >= 0) & (indices < columns)
    at = indices.long().where(known, columns)
    found = torch.zeros(*indices.shape[:2], columns + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(2, at, True)[..., :columns]


def reach_of(
    mask: Bool[Tensor, "B _ L S"], held: Bool[Tensor, "B S"] | None
) -> Int[Tensor, "B L"] | None:
    """Return the last new column that each query sees by a mask.

    Args:
        mask: which columns each query of the pass sees; its own are the last L of S.
        held: which columns hold a token; None: all.

    Returns:
        None if a query does not see every token up to some column, its own or a later one: such a
        mask has no reach. The reach of queries without a token is their own column.
    """
    length, columns = mask.shape[-2:]
    place = torch.arange(columns, device=mask.device)
    own = place[columns - length :]
    seen, held = mask[:, 0], mask.new_ones(1, columns) if held is None else held
    real = held[:, columns - length :]
    last = torch.where(seen, place, -1).amax(-1).maximum(own)
    last = torch.where(real, last, own)
    right = seen == (held[:, None] & (place <= last[..., None]))
    if not bool((right.all(-1) | ~real).all()):
        return None
    reach: Tensor = last - (columns - length)
    return reach
