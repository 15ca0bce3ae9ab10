"""Budgets of sequences in tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kv_policy import Budget, CompleteSelector


def resolved(
    selector: CompleteSelector,
    budgets: Sequence[Budget | None] | None,
    total: Int[Tensor, " B"],
    token_bytes: int,
) -> Int[Tensor, " B"]:
    """Return the budgets of sequences, in tokens per head: their own or the selector's.

    Args:
        selector: the selector; without a budget it keeps every token.
        budgets: budgets of the sequences, None for the selector's; None: the selector's for all.
        total: tokens seen.
        token_bytes: bytes of a token over all layers and heads.
    """
    own, least = selector.budget, max(1, selector.protected)
    if own is None:
        return total.clone()
    if budgets is None:
        return own.resolve(total, token_bytes, least)
    rows = [
        (asked or own).resolve(total[i : i + 1], token_bytes, least)
        for i, asked in enumerate(budgets)
    ]
    return torch.cat(rows)
