"""How many pages tokens can take, and how many of vLLM's blocks pay for them.

vLLM's block is the unit of account: a request that owns b blocks may hold as many pages as b
blocks have room for, and they lie anywhere in the memory that vLLM allocated for keys and values.
So the scheduler's pool says exactly how much memory is left, and no page ever moves because a
block changes hands.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

import torch

from kv_policy import KVPolicy, PageLayout, complete
from kv_runtime.layout import Layout


@dataclass(frozen=True, slots=True, order=True)
class AlikeRows:
    """Table rows (of a layer, a sequence and a KV head) that store tokens alike."""

    count: int
    tokens: int  # of the first tier in a page
    partial: int  # pages beyond the first tier's that a table row may hold and not fill
    window: int  # pages of its raw window

    def pages(self, tokens: int) -> int:
        """Count the pages of so many tokens, at most."""
        return self.count * (-(-tokens // self.tokens) + self.partial) if tokens > 0 else 0


@dataclass(frozen=True, slots=True)
class Account:
    """The pages of a sequence on one device, and what a block pays for."""

    table_rows: tuple[AlikeRows, ...]
    window: int  # newest tokens, which lie in pages of their own
    token_bytes: int  # of a token of the first tier, over all layers and heads
    page_bytes: int
    block_tokens: int  # tokens of a block, as vLLM counts them
    block_pages: int  # pages that a block pays for

    @classmethod
    def of(cls, layout: Layout, block_tokens: int) -> "Account":
        """Read it off the layout of a cache; a block pays for what its tokens take when full."""
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
            block_tokens,
            ceil(full),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers and heads."""
        return self.block_pages * self.page_bytes

    @property
    def window_pages(self) -> int:
        """Pages of a sequence's raw windows, however few tokens it has."""
        return sum(each.count * each.window for each in self.table_rows)

    def holding(self, block_bytes: int) -> "Account":
        """The same with blocks of so many bytes."""
        return replace(self, block_pages=block_bytes // self.page_bytes)

    def pages(self, tokens: int) -> int:
        """Bound the pages of a sequence whose heads keep so many tokens each, or fewer."""
        outside = max(0, tokens - self.window)
        return self.window_pages + sum(each.pages(outside) for each in self.table_rows)

    def later(self, held: int, tokens: int) -> int:
        """Bound the pages of a sequence that holds `held` and then gets so many tokens more.

        Tokens move only to later tiers, whose pages hold no fewer tokens, so that a row's n new
        tokens fill no more pages than n of the first tier, and open one page more in each store.
        """
        return held + sum(each.pages(tokens) for each in self.table_rows)

    def blocks(self, pages: int) -> int:
        """Count the blocks that pay for so many pages."""
        return max(1, -(-pages // self.block_pages))


def kept_tokens(policy: KVPolicy, tokens: int, token_bytes: int) -> int:
    """Say how many of a prompt's tokens a head keeps on average; without a budget all of them."""
    selector = None if policy.selector is None else complete(policy.selector)
    if selector is None or selector.budget is None:
        return tokens
    least = max(1, selector.protected)
    kept = int(selector.budget.resolve(torch.tensor([tokens]), token_bytes, least))
    window = policy.formats.window if policy.formats is not None else 0
    return min(tokens, kept + window)


def _alike(count: int, tiers: tuple[PageLayout, ...], window: int) -> AlikeRows:
    return AlikeRows(count, min(tier.tokens for tier in tiers), sum(_partial(tiers)), window)


def _partial(tiers: tuple[PageLayout, ...]) -> Iterable[int]:
    for tier, layout in enumerate(tiers):
        yield int(tier > 0)
        if layout.format.block > 1:
            yield _waiting_pages(layout)


def _waiting_pages(layout: PageLayout) -> int:
    """Pages of the tokens that wait, raw, until they fill a block, and one for the block."""
    raw = layout.format.key.dim + layout.format.value.dim
    in_page = max(1, layout.nbytes // (4 * raw + 8))  # at most four bytes a number
    return -(-layout.format.block // in_page) + 1
