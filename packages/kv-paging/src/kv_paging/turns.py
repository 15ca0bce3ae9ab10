"""A decode step with block-encoded tiers, which are processed in turn and synchronize."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging.residual import ResidualTier
from kv_paging.step import merge, or_else
from kv_paging.store import TokenStore
from kv_paging.work import NewTokens, Placement


def step_in_turn(
    members: Sequence[TokenStore | ResidualTier],
    choice: Placement,
    place: Int[Tensor, "K S"],
    candidate: NewTokens,
) -> None:
    """Apply a step, as `step.carry_out`, by the operations of each tier.

    A fixed pool must have all pages for new tokens before any page is released.

    Raises:
        PoolExhausted: it does not; nothing has changed.
    """
    table_rows = torch.arange(place.shape[1], device=place.device)
    leaves, swaps, arrives, enters = _moves(members, choice, place)
    reserve_step([(members, choice, place)])
    victim = candidate
    for member, mine, at in zip(members[:-1], leaves, place, strict=False):
        victim = or_else(victim, mine, member.fetch(table_rows, at.masked_fill(~mine, -1)))
    for member, mine, swap, at in zip(members, leaves, swaps, place, strict=True):
        if isinstance(member, TokenStore):
            slot = at.masked_fill(~swap, -1)
            beside = (candidate.score, candidate.position)
            member.replace(table_rows, slot, candidate.key, candidate.value, *beside)
        member.remove(table_rows, at.masked_fill(~(mine & ~swap), -1))
    both = merge(victim, candidate)
    for member, first, second in zip(members, arrives, enters, strict=True):
        member.append(
            table_rows,
            _paired(both.key),
            _paired(both.value),
            torch.stack((first, second), 1),
            None if both.score is None else _paired(both.score),
            None if both.position is None else _paired(both.position),
        )


def _paired(x: Tensor) -> Tensor:
    """Combine two consecutive lists into two tokens per table row."""
    first, second = x.chunk(2)
    return torch.stack((first, second), 1)


def _moves(
    members: Sequence[TokenStore | ResidualTier], choice: Placement, place: Int[Tensor, "K S"]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Return per tier the masks of victims, reused slots, arriving victims and new candidates."""
    leaves = [(choice.victim == i) & (place[i] >= 0) for i in range(len(members))]
    arrives, moved = [], torch.zeros_like(leaves[0])
    for tier, mine in enumerate(leaves):
        arrives.append(moved & (choice.target == tier))
        moved = moved | mine
    swaps = [
        mine & (choice.candidate == i) & isinstance(member, TokenStore)
        for i, (member, mine) in enumerate(zip(members, leaves, strict=True))
    ]
    enters = [(choice.candidate == i) & ~swap for i, swap in enumerate(swaps)]
    return leaves, swaps, arrives, enters


def reserve_step(
    turns: Sequence[tuple[Sequence[TokenStore | ResidualTier], Placement, Int[Tensor, "K _"]]],
) -> None:
    """Reserve the pages for the tokens of a step, for all kinds of table rows.

    Raises:
        PoolExhausted: a fixed pool has too few; nothing has changed.
    """
    pool = turns[0][0][0].pool
    if pool.grows:
        return
    needed = [
        member.pages_for_more(first.long() + second.long())
        for members, choice, place in turns
        for member, first, second in zip(members, *_moves(members, choice, place)[2:], strict=True)
    ]
    pool.reserve(int(torch.stack(needed).sum()))
