"""Requests whose drafted tokens a step verifies, split into rows with one new token each.

A token of a step attends to the others of its step uncompressed (`SlotLayer`). Drafts would do so
too, and be judged by another attention than that of decoding. Split, each attends to all tokens
before it as they are stored, drafts included, as when one token is decoded in a step.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kv_runtime.copies import to_device


def split_requests(
    start: Int[Tensor, " B1"],
    length: Int[Tensor, " B"],
    table: Int[Tensor, "B W"],
    split: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, " R1"], Int[Tensor, " R"], Int[Tensor, "R W"]]:
    """Return the arguments of `Blocks.step` for the same tokens in more rows.

    The tokens of a step must be stored before any of its rows attends, as `SlotLayer` does.

    Args:
        start: on the CPU, the index of each request's first new token among all new ones, then
            their number.
        length: tokens of each request, including new ones.
        table: block table of each request.
        split: on the CPU, the requests to be split; without new tokens, one is still one row.
    """
    new = start.diff()
    rows = new.clamp(min=1).where(split, 1)
    request = torch.arange(len(new)).repeat_interleave(rows)
    count = new.clamp(max=1).where(split, new)[request]
    end = count.cumsum(0) + start[0]
    after = start[1:][request] - end  # the request's tokens in later rows
    moved, less = to_device(torch.stack((request, after.to(request.dtype))), length.device)
    ends = torch.cat((start[:1], end.to(start.dtype)))
    return ends, length[moved] - less.to(length.dtype), table[moved]
