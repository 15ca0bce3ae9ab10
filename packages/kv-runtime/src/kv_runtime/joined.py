"""States of caches one after another: several documents, each compressed by itself, in one cache.

A token keeps what was stored of it, so keys stay rotated by the positions of their own prompt, as
in parallel context windows (Ratner et al., 2023, arXiv:2212.10947). Tokens of a later document do
not attend to an earlier one. What follows attends to all of them, from positions after all tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from kv_policy import CompleteSelector, KVPolicy, complete
from kv_policy.optional import Thresholding
from kv_runtime.bases import Bases
from kv_runtime.layout import Layout
from kv_runtime.retain.budgets import resolved
from kv_runtime.retain.plans import Plans, TurnCounts
from kv_runtime.saved import CacheFacts, CacheState, expect_facts, expect_state, plans_of


def expect_joinable(layout: Layout, selector: CompleteSelector | None) -> None:
    """Raise unless what a policy stores of a token depends on neither its place nor its neighbours.

    Raises:
        ValueError: the policy has a raw window, stores blocks of tokens together, sums attention
            over the whole sequence, or assigns generated tokens by thresholds of one prompt.
    """
    reason = None
    if layout.window:
        reason = f"has a raw window of {layout.window} tokens, which are the last of one prompt"
    elif any(page.format.block > 1 for tiers in layout.pages for page in tiers):
        reason = "stores several tokens as a block, whose last one is incomplete"
    elif selector is not None and selector.running is not None:
        reason = "adds up the attention that tokens receive, which documents do not give each other"
    elif selector is not None and isinstance(selector.selector, Thresholding):
        reason = "assigns generated tokens to tiers by thresholds, which are those of one prompt"
    if reason is not None:
        raise ValueError(_refused(reason))


def _refused(reason: str) -> str:
    return (
        f"documents cannot follow each other under this policy: it {reason}; use a format without "
        "a raw window, alone or beside a selector that scores tokens once, such as "
        "gate:file=F,keep=25%+k8v4, or compress the documents as one text"
    )


def checked_states(
    policy: KVPolicy, layout: Layout, bases: Bases | None, states: Sequence[CacheState]
) -> CacheState:
    """Return the state of a cache that holds the tokens of several, which may be untrusted.

    Args:
        policy: of the cache.
        layout: of the cache.
        bases: of the cache.
        states: as for `joined`.

    Raises:
        ValueError: a state is of another policy, shape or basis, or as for `joined`.
        DamagedStateError: a state contradicts itself.
    """
    for each in states:
        expect_facts(policy, layout, bases, each.facts)
        expect_state(layout, each)
    selector = None if policy.selector is None else complete(policy.selector)
    return joined(layout, selector, states)


def joined(
    layout: Layout, selector: CompleteSelector | None, states: Sequence[CacheState]
) -> CacheState:
    """Return the state of a cache that holds the tokens of several, in order.

    Args:
        layout: of the cache; `expect_state` has accepted each state for it.
        selector: of the policy.
        states: one or more, of as many sequences each.

    Raises:
        ValueError: the policy does not allow it (`expect_joinable`), or the states differ in
            sequences or budgets.
        DamagedStateError: plans do not fit the sequences.
    """
    first, *more = states
    if more:
        expect_joinable(layout, selector)
        found = [state.tensors.get("plan.thresholds") for state in states]
        if any(x is not None and bool(x.any()) for x in found):
            raise ValueError(_refused("keeps thresholds of its last plan, which are of one prompt"))
    for state in more:
        first = _after(layout, selector, first, state)
    return first


def _after(
    layout: Layout, selector: CompleteSelector | None, first: CacheState, second: CacheState
) -> CacheState:
    if first.facts.sequences != second.facts.sequences:
        raise ValueError(
            f"documents of {first.facts.sequences} and {second.facts.sequences} sequences cannot "
            "follow each other; compress batches of equal size"
        )
    if first.facts.budgets != second.facts.budgets:
        raise ValueError(
            "the sequences of documents that follow each other have different budgets: "
            f"{first.facts.budgets} and {second.facts.budgets}; compress them with the same"
        )
    before = first.tensors["seen"]
    tensors = {
        "seen": before + second.tensors["seen"],
        "columns": torch.cat((first.tensors["columns"], second.tensors["columns"]), 1),
    }
    for name, length in first.tensors.items():
        if name.startswith("store.") and name.endswith(".length"):
            store = name.removesuffix("length")
            tensors |= _rows(store, length, first.tensors, second.tensors, before)
    facts = replace(first.facts, columns=first.facts.columns + second.facts.columns)
    plans = plans_of(layout, selector, first), plans_of(layout, selector, second)
    if selector is None or plans[0] is None or plans[1] is None:
        return CacheState(facts, tensors)
    budgets = plans[0].budgets
    tensors["plan.budget"] = resolved(selector, budgets, tensors["seen"], layout.token_bytes)
    return CacheState(_planned(facts, plans[0], plans[1]), tensors)


def _rows(
    store: str,
    length: Int[Tensor, "N B H"],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    before: Int[Tensor, " B"],
) -> dict[str, Tensor]:
    """Join the slots of each table row; `before` are the tokens of the sequences in the first."""
    more = second[f"{store}length"]
    rows = [torch.repeat_interleave(each.flatten().long()) for each in (length, more)]
    order = torch.cat(rows).argsort(stable=True)  # by table row, the first document's slots first
    found = {f"{store}length": length + more}
    for name in first:
        if not name.startswith(store) or name in found:
            continue
        mine = second[name]
        if name == f"{store}position":
            sequence = rows[1] // length.shape[2] % length.shape[1]
            shifted = mine + before[sequence].to(mine.dtype)
            mine = torch.where(mine < 0, mine, shifted)
        found[name] = torch.cat((first[name], mine))[order]
    return found


def _planned(facts: CacheFacts, first: Plans, second: Plans) -> CacheFacts:
    """Return the counts of both: a sequence is due if it was in either."""
    mine, theirs = first.turns, second.turns
    turns = TurnCounts(
        tuple(map(max, mine.planned, theirs.planned)),
        tuple(a or b for a, b in zip(mine.due, theirs.due, strict=True)),
        tuple(map(max, mine.steps, theirs.steps)),
        passes=max(mine.passes, theirs.passes),
        tokens=max(mine.tokens, theirs.tokens),
    )
    return replace(facts, turns=turns)
