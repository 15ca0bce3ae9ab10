"""One token enters a table row and one leaves or moves, in all table rows at once, without waiting.

Only what is true of all rows is decided here on the host: which tiers there are. Everything else
is masks, so the number of operations depends on the tiers alone. What a mask rules out is written
to the pool's scratch page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from kv_paging.moves import Segment, block_segments, put, take
from kv_paging.pool import PagePool
from kv_paging.table import PageTable
from kv_paging.tokens import BOTH, Stored, encode_tokens, read_tokens, write_encoded
from kv_paging.work import DecodeStep, NewTokens
from kv_policy import PagedTokens


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What a step does to the table rows of one tier."""

    pages: PagedTokens
    slot: Int[Tensor, " S"]  # of the victim; 0 where there is none
    leaves: Bool[Tensor, " S"]  # the victim is of this tier
    swap: Bool[Tensor, " S"]  # and the candidate takes its slot
    arrives: Bool[Tensor, " S"]  # an earlier tier's victim comes to this one
    enters: Bool[Tensor, " S"]  # the candidate comes to a new slot
    end: Int[Tensor, " S"]  # length once the victim is gone

    @property
    def table(self) -> PageTable:
        """Its side of the page table."""
        return PageTable.over(self.pages)

    @property
    def gone(self) -> Bool[Tensor, " S"]:
        """Where the last token moves into the victim's slot."""
        return self.leaves & ~self.swap

    @property
    def length(self) -> Int[Tensor, " S"]:
        """Tokens after the step."""
        return self.end + self.arrives.long() + self.enters.long()

    @property
    def entry(self) -> Int[Tensor, " S"]:
        """The candidate's new slot: it comes after the victim."""
        return self.end + self.arrives.long()

    @property
    def emptied(self) -> Bool[Tensor, " S"]:
        """Where the last page has no token any more."""
        return self.gone & (self.end % self.pages.layout.tokens == 0)

    @property
    def opened(self) -> tuple[Bool[Tensor, " S"], Bool[Tensor, " S"]]:
        """Where the victim, and where the candidate, is the first token of a new page."""
        tokens = self.pages.layout.tokens
        return self.arrives & (self.end % tokens == 0), self.enters & (self.entry % tokens == 0)


def plan_step(work: DecodeStep) -> tuple[TierPlan, ...]:
    """Say what a step does to each tier; nothing is changed."""
    plans, choice = [], work.choice
    moved = torch.zeros_like(choice.candidate, dtype=torch.bool)
    for tier, pages in enumerate(work.tiers):
        leaves = (choice.victim == tier) & (work.place[tier] >= 0)
        stays = choice.candidate == tier
        plans.append(
            TierPlan(
                pages=pages,
                slot=work.place[tier].clamp(min=0),
                leaves=leaves,
                swap=leaves & stays,
                arrives=moved & (choice.target == tier),
                enters=stays & ~leaves,
                end=pages.length[:, 0].long() - (leaves & ~stays).long(),
            )
        )
        moved = moved | leaves
    return tuple(plans)


def pages_needed(works: Sequence[DecodeStep]) -> Int[Tensor, ""]:
    """Count the pages that a step takes, less those it gives back first."""
    plans = [plan for work in works for plan in plan_step(work)]
    opened = torch.cat([mask for plan in plans for mask in plan.opened])
    return opened.sum() - torch.cat([plan.emptied for plan in plans]).sum()


def carry_out(pool: PagePool, works: Sequence[DecodeStep]) -> None:
    """Do a step; see `PageKernels.step`."""
    planned = [plan_step(work) for work in works]
    # A codec that refuses does so before anything has changed.
    entering = [_entering(p, work.candidate) for p, work in zip(planned, works, strict=True)]
    every = [plan for plans in planned for plan in plans]
    emptied = [_fill_gap(plan) for plan in every]
    pool.give(torch.cat(emptied), torch.cat([plan.emptied for plan in every]))
    opened = [mask for plan in every for mask in plan.opened]
    pages = iter(pool.take(torch.cat(opened)).split([len(mask) for mask in opened]))
    for plans, (arriving, encoded) in zip(planned, entering, strict=True):
        for plan, parts in zip(plans, encoded, strict=True):
            _write(plan, parts, arriving, (next(pages), next(pages)))


def _entering(
    plans: Sequence[TierPlan], candidate: NewTokens
) -> tuple[NewTokens, list[tuple[UInt8[Tensor, "n _"], ...]]]:
    """The victims and the candidates, and both encoded for each tier."""
    arriving = merge(_victims(plans[:-1], candidate), candidate)
    return arriving, [encode_tokens(p.pages.layout, arriving.key, arriving.value) for p in plans]


def _write(
    plan: TierPlan,
    parts: Sequence[UInt8[Tensor, "n _"]],
    arriving: NewTokens,
    new: tuple[Int[Tensor, " S"], Int[Tensor, " S"]],
) -> None:
    """Write what enters a tier to its slots, `new` pages where a slot is the first of its page."""
    table, data, tokens = plan.table, plan.pages.data, plan.pages.layout.tokens
    for slot, page, some in zip((plan.end, plan.entry), new, plan.opened, strict=True):
        table.enter_some(slot // tokens, page, some)
    slot = torch.stack((plan.end, plan.entry.where(~plan.swap, plan.slot)))
    some = torch.stack((plan.arrives, plan.enters | plan.swap))
    page = torch.stack([table.find(each // tokens) for each in slot])
    write_encoded(
        data,
        plan.pages.layout,
        page.where(some, len(data) - 1).flatten(),  # the scratch page
        (slot % tokens).flatten(),
        parts,
        arriving.score,
        arriving.position,
    )
    plan.pages.length[:, 0] = plan.length


def _victims(plans: Sequence[TierPlan], like: NewTokens) -> NewTokens:
    """Decode the victims that may go to a later tier; anything where there is none."""
    found = like
    for plan in plans:
        tokens, data = plan.pages.layout.tokens, plan.pages.data
        page, row = plan.table.find(plan.slot // tokens), plan.slot % tokens

        def take_one(
            segment: Segment, data: Tensor = data, page: Tensor = page, row: Tensor = row
        ) -> Tensor:
            return take(data, segment, page[:, None], row[:, None])

        read = read_tokens(plan.pages.layout, plan.leaves[:, None], take_one, BOTH)
        found = or_else(found, plan.leaves, read)
    return found


def _fill_gap(plan: TierPlan) -> Int[Tensor, " S"]:
    """Move the last token into the victim's slot, and give its page."""
    data, tokens, gone = plan.pages.data, plan.pages.layout.tokens, plan.gone
    last = plan.table.find(plan.end // tokens)
    gap = plan.table.find(plan.slot // tokens).where(gone, len(data) - 1)
    for segment in block_segments(plan.pages.layout):
        rows = take(data, segment, last, plan.end % tokens)
        put(data, segment, gap, plan.slot % tokens, rows)
    return last


def or_else(tokens: NewTokens, mask: Bool[Tensor, " S"], found: Stored) -> NewTokens:
    """The same, with what was found, one token of each table row, where it is marked."""
    assert found.key is not None  # vectors were asked for
    assert found.value is not None
    score, position = tokens.score, tokens.position
    if found.score is not None and score is not None:
        score = found.score[:, 0].where(mask, score)
    if found.position is not None and position is not None:
        position = found.position[:, 0].where(mask, position)
    return NewTokens(
        _pick(mask, found.key[:, 0], tokens.key),
        _pick(mask, found.value[:, 0], tokens.value),
        score,
        position,
    )


def merge(first: NewTokens, second: NewTokens) -> NewTokens:
    """Put two lists of tokens one after the other."""
    score, position = None, None
    if first.score is not None and second.score is not None:
        score = torch.cat((first.score, second.score))
    if first.position is not None and second.position is not None:
        position = torch.cat((first.position, second.position))
    key = torch.promote_types(first.key.dtype, second.key.dtype)
    value = torch.promote_types(first.value.dtype, second.value.dtype)
    return NewTokens(
        torch.cat((first.key.to(key), second.key.to(key))),
        torch.cat((first.value.to(value), second.value.to(value))),
        score,
        position,
    )


def _pick(mask: Bool[Tensor, " S"], yes: Tensor, no: Tensor) -> Tensor:
    dtype = torch.promote_types(yes.dtype, no.dtype)
    return yes.to(dtype).where(mask[:, None], no.to(dtype))
