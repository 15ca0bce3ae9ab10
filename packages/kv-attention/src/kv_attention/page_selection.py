"""The selection of pages in torch, and how many pages the host knows it to read at most."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kv_attention.page_bounds import PageBounds, page_scores
from kv_policy import PagedTokens, PageReading


def selected(
    q: Float[Tensor, "B H G D"],
    pages: PagedTokens,
    bounds: PageBounds,
    reading: PageReading,
    *,
    waits: bool = True,
) -> PagedTokens:
    """Select as `kv_attention.select_pages`.

    Args:
        q: as there.
        pages: as there.
        bounds: as there.
        reading: as there.
        waits: whether the host may read how many pages are selected; otherwise the table has
            columns for the most that it knows of.
    """
    tokens, length = pages.layout.tokens, pages.length.long()
    longest = known_longest(pages)
    columns = -(-longest // tokens)
    most = most_read(reading, longest, tokens, bounds.missing)
    if most is None:
        return pages
    held, full = (length + tokens - 1) // tokens, length // tokens
    column = torch.arange(columns, device=q.device)
    always = always_read(column, length, tokens, reading) | (column >= bounds.count[..., None])
    always &= column < full[..., None]
    # The page that is appended to counts as one, and is no candidate.
    some = (reading.pages(held, tokens) - (held - full)).maximum(always.sum(-1)).minimum(full)
    if waits:
        least, most = torch.stack(((full - some).amax(), some.amax())).tolist()
        if not least:
            return pages
    score = page_scores(q, bounds.by_column(pages, columns), columns, tokens)
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


def known_longest(pages: PagedTokens) -> int:
    """Return a bound of the tokens of table rows, without asking the device."""
    return pages.table.shape[2] * pages.layout.tokens if pages.longest is None else pages.longest


def most_read(
    reading: PageReading, longest: int, tokens: int, missing: int | None = None
) -> int | None:
    """Return the most full pages that a table row of up to `longest` tokens may read.

    Args:
        reading: the limit.
        longest: the bound of the tokens of a table row.
        tokens: of a page.
        missing: at most so many full pages have no bounds; None: unknown.

    Returns:
        None: a row of up to so many tokens reads all of its pages.
    """
    held, full = -(-longest // tokens), longest // tokens
    limit = reading.pages_of(held, tokens)
    if not full or limit == held:  # a share of fewer pages leaves out none, either
        return None
    if missing is None:
        return full
    always = -(-reading.first // tokens) - (-reading.last // tokens) + missing
    return min(full, max(limit, always))


def always_read(
    column: Int[Tensor, " T"], length: Int[Tensor, "B H"], tokens: int, reading: PageReading
) -> Bool[Tensor, "B H T"]:
    """Return which pages have one of the first or the last tokens that are always read."""
    newest = (column + 1) * tokens > (length - reading.last)[..., None]
    return (column * tokens < reading.first) | newest
