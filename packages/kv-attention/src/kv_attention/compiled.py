"""What compiled kernels do not take, whatever they are compiled with."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kv_attention.tokens import DenseTokens
from kv_policy import PagedTokens
from kv_policy.described import NUMBERS, described


def refused(
    q: Float[Tensor, "B H G L D"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
    most_dim: int,
) -> str | None:
    """Say why a pass is torch's: its numbers, its dimensions or its codecs; None if it is not.

    Args:
        q: queries.
        pages: stored tokens.
        dense: plain tokens.
        value_dim: Dv.
        most_dim: of the vectors that the kernels take.
    """
    if q.dtype not in NUMBERS:
        return f"queries in {q.dtype}; compiled kernels compute in float32"
    if torch.is_grad_enabled() and q.requires_grad:
        return "gradients are asked for"
    if max(q.shape[4], value_dim) > most_dim:
        return f"vectors of more than {most_dim} dimensions"
    for part in pages:
        reason = described(part.layout).declined
        if reason is not None:
            return reason
    if any(x.dtype not in NUMBERS for tokens in dense for x in (tokens.key, tokens.value)):
        return "plain tokens in float64"
    return None
