"""The pages that a decode step reads: those in which a query may find its largest logits.

A page has bounds of its keys by channel, so a query's logits in the page are at most the sum over
channels of the larger product (Tang et al. 2024, Quest). Attention itself then reads a table with
fewer pages, so every backend computes it as over all pages.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kv_attention.backends import load_selection
from kv_attention.page_bounds import PageBounds, page_scores
from kv_policy import PagedTokens, PageReading


def select_pages(
    q: Float[Tensor, "B H G D"],
    pages: PagedTokens,
    bounds: PageBounds,
    reading: PageReading,
    backend: str = "torch",
) -> PagedTokens:
    """Return the pages that a decode step reads, as a table of these alone, in their order.

    Of pages with equal scores the first are read. The result is `pages` itself if all are read;
    otherwise tokens have other slots in it. Synchronizes with the device once.

    Args:
        q: the query of each query head, in the basis of the stored keys.
        pages: the stored tokens of a layer.
        bounds: the bounds of their keys.
        reading: the limit.
        backend: the backend that selects; torch does if it does not.
    """
    select = load_selection(backend)
    selected = None if select is None else select(q, pages, bounds, reading)
    return selected if selected is not None else _selected(q, pages, bounds, reading)


def _selected(
    q: Float[Tensor, "B H G D"], pages: PagedTokens, bounds: PageBounds, reading: PageReading
) -> PagedTokens:
    tokens, length = pages.layout.tokens, pages.length.long()
    longest = pages.table.shape[2] * tokens if pages.longest is None else pages.longest
    columns = -(-longest // tokens)
    if not columns:
        return pages
    held, full = (length + tokens - 1) // tokens, length // tokens
    column = torch.arange(columns, device=q.device)
    always = always_read(column, length, tokens, reading) | (column >= bounds.count[..., None])
    always &= column < full[..., None]
    # The page that is appended to counts as one, and is no candidate.
    some = (reading.pages(held, tokens) - (held - full)).maximum(always.sum(-1)).minimum(full)
    least, most = torch.stack(((full - some).amax(), some.amax())).tolist()
    if not least:
        return pages
    score = page_scores(q, bounds, columns)
    score = score.masked_fill(always, torch.inf).masked_fill(column >= full[..., None], -torch.inf)
    picked = score.sort(dim=-1, descending=True, stable=True).indices[..., :most]
    # In their order, so that rounding is as over all pages; others behind them.
    unused = torch.arange(most, device=q.device) >= some[..., None]
    picked = picked.masked_fill(unused, columns).sort(-1).values
    picked = pad(picked, (0, 1), value=columns).scatter(-1, some[..., None], full[..., None])
    place = picked.clamp(max=pages.table.shape[2] - 1)
    if pages.reverse:
        place = pages.table.shape[2] - 1 - place
    return replace(
        pages,
        table=pages.table.gather(2, place),
        length=(some * tokens + length % tokens).to(pages.length.dtype),
        reverse=False,
        longest=min(longest, most * tokens + tokens - 1),
        tiles=None,
    )


def always_read(
    column: Int[Tensor, " T"], length: Int[Tensor, "B H"], tokens: int, reading: PageReading
) -> Bool[Tensor, "B H T"]:
    """Return which pages have one of the first or the last tokens that are always read."""
    newest = (column + 1) * tokens > (length - reading.last)[..., None]
    return (column * tokens < reading.first) | newest
