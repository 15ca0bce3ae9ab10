"""A decode step of all table rows without synchronization: insert one token, evict or move one.

The host only decides by the tiers, which are the same for all rows. Everything else is masked, so
the number of operations depends on the tiers alone. Masked writes target the pool's scratch page.
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
    """The changes of a step to the table rows of one tier."""

    pages: PagedTokens
    slot: Int[Tensor, " S"]  # of the victim; 0 without a victim
    leaves: Bool[Tensor, " S"]  # the victim is in this tier
    swap: Bool[Tensor, " S"]  # and the candidate takes its slot
    arrives: Bool[Tensor, " S"]  # an earlier tier's victim moves to this one
    enters: Bool[Tensor, " S"]  # the candidate gets a new slot
    end: Int[Tensor, " S"]  # length without the victim

    @property
    def table(self) -> PageTable:
        """The tier's side of the page table."""
        return PageTable.over(self.pages)

    @property
    def gone(self) -> Bool[Tensor, " S"]:
        """Whether the last token moves into the victim's slot."""
        return self.leaves & ~self.swap

    @property
    def length(self) -> Int[Tensor, " S"]:
        """Number of tokens after the step."""
        return self.end + self.arrives.long() + self.enters.long()

    @property
    def entry(self) -> Int[Tensor, " S"]:
        """The candidate's new slot, after the victim."""
        return self.end + self.arrives.long()

    @property
    def emptied(self) -> Bool[Tensor, " S"]:
        """Whether the last page becomes empty."""
        return self.gone & (self.end % self.pages.layout.tokens == 0)

    @property
    def opened(self) -> tuple[Bool[Tensor, " S"], Bool[Tensor, " S"]]:
        """Whether the victim, and whether the candidate, is the first token of a new page."""
        tokens = self.pages.layout.tokens
        return self.arrives & (self.end % tokens == 0), self.enters & (self.entry % tokens == 0)


def plan_step(work: DecodeStep) -> tuple[TierPlan, ...]:
    """Plan the changes of a step to each tier, without applying them."""
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
    """Return the pages allocated by a step, minus those it releases first."""
    plans = [plan for work in works for plan in plan_step(work)]
    opened = torch.cat([mask for plan in plans for mask in plan.opened])
    return opened.sum() - torch.cat([plan.emptied for plan in plans]).sum()


def carry_out(pool: PagePool, works: Sequence[DecodeStep]) -> None:
    """Apply a step; see `PageKernels.step`."""
    planned = [plan_step(work) for work in works]
    # If a codec raises, nothing has changed yet.
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
    """Return the victims and the candidates, and both encoded for each tier."""
    arriving = merge(_victims(plans[:-1], candidate), candidate)
    return arriving, [encode_tokens(p.pages.layout, arriving.key, arriving.value) for p in plans]


def _write(
    plan: TierPlan,
    parts: Sequence[UInt8[Tensor, "n _"]],
    arriving: NewTokens,
    new: tuple[Int[Tensor, " S"], Int[Tensor, " S"]],
) -> None:
    """Write a tier's new tokens to their slots, in `new` pages if a slot opens its page."""
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
    """Decode the victims that may move to a later tier; undefined without a victim."""
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
    """Move the last token into the victim's slot, and return its page."""
    data, tokens, gone = plan.pages.data, plan.pages.layout.tokens, plan.gone
    last = plan.table.find(plan.end // tokens)
    gap = plan.table.find(plan.slot // tokens).where(gone, len(data) - 1)
    for segment in block_segments(plan.pages.layout):
        rows = take(data, segment, last, plan.end % tokens)
        put(data, segment, gap, plan.slot % tokens, rows)
    return last


def or_else(tokens: NewTokens, mask: Bool[Tensor, " S"], found: Stored) -> NewTokens:
    """Return the tokens with the marked ones replaced by `found`, one per table row."""
    assert found.key is not None  # vectors were requested
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
    """Concatenate two lists of tokens."""
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
