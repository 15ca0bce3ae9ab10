"""The choice of pages to free at the lowest cost (KV-Compress, section 4.2.2).

A head frees its first page by evicting as many of its lowest scores as its last page holds, and
each further one by evicting a page's worth more: the empty slots of the last page count as scores
lower than any other. The price of a page is the highest score evicted with it. Prices never fall
within a head, so taking the cheapest pages of all heads takes the lowest scores of each.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_policy import DROP, FRESH, PlanView, ascending, best


class Offers(NamedTuple):
    """The pages that heads could free, in order within each head."""

    price: Float[Tensor, "N B H T"]  # highest evicted score; inf where there is no such page
    tokens: Int[Tensor, "N B H T"]  # tokens evicted with the page


def cheapest_pages(view: PlanView, *, sinks: int, recent: int) -> UInt8[Tensor, "N B H L"]:
    """Evict the cheapest pages of all heads and layers in view, until the budget is met.

    Every tier has its own pages; a token is evicted from its tier, or the one it would enter. A
    page costs a head's lowest scores.

    Args:
        view: the tokens and their scores.
        sinks: first tokens of a sequence, never evicted.
        recent: newest tokens of a sequence, never evicted.

    Returns:
        The tier of each token, or DROP.
    """
    here = view.position >= 0
    newest = view.length[None, :, None, None] - recent
    safe = (view.position < sinks) | (view.position >= newest)
    score = view.score.masked_fill(safe, torch.inf)
    tier = view.tier.masked_fill(view.tier == FRESH, 0)
    page = torch.ones(1, dtype=torch.long) if view.page is None else view.page
    inside = [here & (tier == i) for i in range(len(page))]
    each = [offers(score, held, size) for held, size in zip(inside, page, strict=True)]
    heads = here.shape[0] * here.shape[2]
    excess = here.sum((0, 2, 3)) - view.budget * heads
    stays = torch.zeros_like(here)
    for held, count in zip(inside, taken(each, excess), strict=True):
        stays |= without(score, held, count)
    return torch.where(stays, tier, DROP)


def offers(
    score: Float[Tensor, "N B H L"],
    held: Bool[Tensor, "N B H L"],
    page: Int[Tensor, ""] | Int[Tensor, "N H"],
) -> Offers:
    """Compute the price of each head's pages.

    Args:
        score: finite, or infinite for protected tokens.
        held: tokens of this tier.
        page: tokens per page, for all or per layer and head; on the CPU.
    """
    places, most = score.shape[-1], -(-score.shape[-1] // int(page.min()))
    page = (page[:, None] if page.ndim else page).to(score.device, non_blocking=True)
    count = held.sum(-1)
    sorted_scores = ascending(score.masked_fill(~held, torch.inf))
    number = torch.arange(most, device=score.device)
    first = torch.where(count % page == 0, page, count % page)[..., None]
    page = page[..., None]
    last = first + number * page  # tokens evicted once so many pages are free
    tokens = torch.where(number == 0, first, page).expand_as(last)
    price = sorted_scores.gather(-1, (last - 1).clamp(max=places - 1))
    # Evictable tokens next to protected ones free no page: they are evicted last.
    loose = (sorted_scores.isfinite().sum(-1, keepdim=True) - (last - tokens)).clamp(min=0)
    price = price.where(loose >= tokens, torch.finfo(price.dtype).max)
    return Offers(price.masked_fill(loose == 0, torch.inf), torch.minimum(tokens, loose))


def taken(each: list[Offers], excess: Int[Tensor, " B"]) -> list[Int[Tensor, "N B H"]]:
    """Take the cheapest pages until they hold `excess` tokens of each sequence, or none is left.

    Among equal prices, the pages that cost their heads least so far are taken first, heads in
    order, so equal scores are taken evenly. Protected tokens are never taken.

    Args:
        each: the offers of each tier.
        excess: tokens over the budget; heads and layers of the offers share them.

    Returns:
        Tokens to evict per tier and head.
    """

    def flat(x: Tensor) -> Tensor:
        return x.permute(1, 3, 0, 2).flatten(1)  # B, pages of one head after another

    price = torch.cat([flat(offer.price) for offer in each], 1)
    tokens = torch.cat([flat(offer.tokens) for offer in each], 1)
    order = price.argsort(dim=1, stable=True)
    sorted_tokens = tokens.gather(1, order)
    before = sorted_tokens.cumsum(1) - sorted_tokens
    goes = (before < excess[:, None]) & price.gather(1, order).isfinite()
    chosen = torch.zeros_like(goes).scatter(1, order, goes) * tokens
    found, start = [], 0
    for offer in each:
        n, b, h, t = offer.price.shape
        part = chosen[:, start : start + t * n * h].view(b, t, n, h)
        found.append(part.sum(1).transpose(0, 1))
        start += t * n * h
    return found


def without(
    score: Float[Tensor, "N B H L"], held: Bool[Tensor, "N B H L"], count: Int[Tensor, "N B H"]
) -> Bool[Tensor, "N B H L"]:
    """Mark held tokens except the `count` lowest scores of each head; of ties evict the later."""
    return best(score.masked_fill(~held, -torch.inf), held.sum(-1) - count) & held
