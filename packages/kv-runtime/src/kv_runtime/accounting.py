"""Bounds on the pages of a sequence, and the number of vLLM blocks that cover them.

vLLM's block is the unit of account: a request that owns b blocks may hold as many pages as fit in b
blocks, anywhere in the memory that vLLM allocated for keys and values. So the scheduler's pool
knows exactly how much memory is free, and no page moves when a block changes its owner.

Beside layers that the engine keeps, whose blocks are of the same pool, pages are in the blocks of
all requests together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Final

import torch

from kv_policy import Budget, KVPolicy, PageLayout, complete
from kv_runtime.layout import Layout
from kv_runtime.slots import ALIGNED, LOSS

# Generated tokens of a request that an engine may schedule before their pages are counted.
AHEAD: Final = 3


@dataclass(frozen=True, slots=True, order=True)
class AlikeRows:
    """Heads (one layer's KV head of one sequence) with the same storage."""

    count: int
    tokens: int  # tokens of the first tier per page
    partial: int  # pages beyond the first tier's that a head may fill only partially
    window: int  # pages of the raw window

    def pages(self, tokens: int) -> int:
        """Return the maximum number of pages for `tokens` tokens per head."""
        return self.count * (-(-tokens // self.tokens) + self.partial) if tokens > 0 else 0


@dataclass(frozen=True, slots=True)
class Account:
    """The pages of a sequence on one device, and the pages covered by a block."""

    table_rows: tuple[AlikeRows, ...]
    window: int  # newest tokens, which have separate pages
    token_bytes: int  # bytes of a token of the first tier, over all layers and heads
    page_bytes: int
    page_tokens: int  # tokens of the first tier per page, about
    block_tokens: int  # tokens per block, as counted by vLLM
    block_pages: int  # pages covered by a block

    @classmethod
    def of(cls, layout: Layout, block_tokens: int, page_tokens: int | None = None) -> "Account":
        """Derive the account from a cache's layout; a block covers its tokens in full pages.

        Args:
            layout: the layout.
            block_tokens: tokens per block.
            page_tokens: those that `layout` was made for; None: those of a block.
        """
        flat = [kind for layer in layout.kind for kind in layer]
        table_rows = tuple(
            _alike(flat.count(kind), tiers, layout.window_pages(kind))
            for kind, tiers in enumerate(layout.pages)
        )
        full = sum(Fraction(each.count * block_tokens, each.tokens) for each in table_rows)
        return cls(
            table_rows,
            layout.window,
            layout.token_bytes,
            layout.page_bytes,
            page_tokens or block_tokens,
            block_tokens,
            ceil(full),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes per block, over all layers and heads."""
        return self.block_pages * self.page_bytes

    @property
    def window_pages(self) -> int:
        """Pages of a sequence's raw windows, which are allocated even for few tokens."""
        return sum(each.count * each.window for each in self.table_rows)

    def holding(self, block_bytes: int) -> "Account":
        """Return the account with blocks of `block_bytes` bytes."""
        return replace(self, block_pages=block_bytes // self.page_bytes)

    def pages(self, tokens: int) -> int:
        """Return the maximum pages of a sequence with at most `tokens` tokens per head."""
        outside = max(0, tokens - self.window)
        return self.window_pages + sum(each.pages(outside) for each in self.table_rows)

    def later(self, held: int, tokens: int) -> int:
        """Return the maximum pages of a sequence with `held` pages after `tokens` more tokens.

        Tokens move only to later tiers, whose pages hold no fewer tokens, so a head's n new tokens
        fill at most as many pages as n tokens of the first tier, plus one partial page per store.
        """
        return held + sum(each.pages(tokens) for each in self.table_rows)

    def branched(self, tokens: int) -> int:
        """Return the most pages that a sequence holds alone, `tokens` tokens after a stored prefix.

        It holds the full pages of the prefix, too, while it only appends to them; see
        `PolicyCache.branch`.
        """
        copied = sum(each.count * (1 + each.partial) for each in self.table_rows)
        return self.later(self.window_pages + copied, tokens)

    def planned(self, tokens: int, kept: int | None, later: int) -> int:
        """Return the maximum pages of a sequence whose prompt is planned after each chunk.

        A chunk is planned before it is stored, so only the tokens that a plan keeps take pages.

        Args:
            tokens: tokens of the sequence.
            kept: tokens per head that a plan keeps outside the window, on average over the heads;
                None: the prompt is planned once, and all tokens take pages until then.
            later: tokens after the prompt.
        """
        most = self.pages(tokens)
        if kept is None:
            return most
        heads, size = sum(e.count for e in self.table_rows), min(e.tokens for e in self.table_rows)
        # The heads share the budget, and each may end with a page of one token.
        full = heads * (kept + size - 1) // size
        partial = sum(each.count * each.partial for each in self.table_rows)
        return min(most, self.later(self.window_pages + full + partial, later))

    def blocks(self, pages: int) -> int:
        """Return the number of blocks that cover `pages` pages."""
        return max(1, -(-pages // self.block_pages))


def fit_page(sizes: Mapping[int, int], wanted: int, nbytes: int) -> tuple[int, int]:
    """Choose the size of pages that fill the blocks of layers with other storage.

    A block holds whole pages, at least as many bytes as the others need, and all blocks have equal
    bytes. The page nearest to the wanted one is taken for which at most `LOSS` of a block is
    unused, or the one with the smallest loss.

    Args:
        sizes: bytes of a page, by its tokens.
        wanted: tokens per page that would be used without other layers.
        nbytes: bytes of a block of the other layers, in each layer.

    Returns:
        Tokens of a page, and bytes of a block in each layer.

    Raises:
        ValueError: no page has aligned blocks.
    """
    found = []
    for tokens, page in sizes.items():
        size = page * -(-nbytes // page)
        if size % ALIGNED == 0:
            loss = size / nbytes - 1
            found.append((max(0.0, loss - LOSS), abs(tokens - wanted), tokens, size))
    if not found:
        raise ValueError(f"no page of {min(sizes)} to {max(sizes)} tokens fits blocks of {nbytes}")
    *_, tokens, size = min(found)
    return tokens, size


def chunk_budget(policy: KVPolicy, budget: Budget | None = None) -> int | None:
    """Return the tokens per head that a policy keeps after each chunk of a prompt.

    Args:
        policy: the policy.
        budget: of a request, instead of the policy's.

    Returns:
        None if it plans whole prompts, or has no budget.
    """
    selector = None if policy.selector is None else complete(policy.selector)
    if selector is None or not selector.plans_chunks or selector.budget is None:
        return None
    return int((budget or selector.budget).amount)


def request_pages(policy: KVPolicy, account: Account, tokens: int) -> int:
    """Return the pages of a request of `tokens` tokens.

    If its prompt is planned by chunk this is the maximum until its first generated tokens; else it
    is that of the kept tokens, once the prompt is compressed.
    """
    kept = chunk_budget(policy)
    if kept is not None:
        return account.planned(tokens, kept, AHEAD)
    return account.pages(kept_tokens(policy, tokens, account.token_bytes))


def kept_tokens(policy: KVPolicy, tokens: int, token_bytes: int) -> int:
    """Return the mean number of prompt tokens kept per head; without a budget, all of them."""
    window = policy.formats.window if policy.formats is not None else 0
    return min(tokens, budget_tokens(policy, tokens, token_bytes) + window)


def budget_tokens(
    policy: KVPolicy, tokens: int, token_bytes: int, budget: Budget | None = None
) -> int:
    """Return the mean number of tokens per head that a plan keeps outside the raw window.

    Args:
        policy: the policy.
        tokens: of the prompt; all are kept without a budget.
        token_bytes: bytes of a token of the first tier, over all layers and heads.
        budget: of a request, instead of the policy's.
    """
    selector = None if policy.selector is None else complete(policy.selector)
    if selector is None or selector.budget is None:
        return tokens
    least, given = max(1, selector.protected), budget or selector.budget
    return int(given.resolve(torch.tensor([tokens]), token_bytes, least))


def _alike(count: int, tiers: tuple[PageLayout, ...], window: int) -> AlikeRows:
    return AlikeRows(count, min(tier.tokens for tier in tiers), sum(_partial(tiers)), window)


def _partial(tiers: tuple[PageLayout, ...]) -> Iterable[int]:
    for tier, layout in enumerate(tiers):
        yield int(tier > 0)
        if layout.format.block > 1:
            yield _waiting_pages(layout)


def _waiting_pages(layout: PageLayout) -> int:
    """Return the pages of the raw residual tokens that do not fill a block yet, plus one."""
    raw = layout.format.key.dim + layout.format.value.dim
    in_page = max(1, layout.nbytes // (4 * raw + 8))  # at most four bytes per element
    return -(-layout.format.block // in_page) + 1
