"""Which pages to free so that what is lost weighs least (KV-Compress, section 4.2.2).

A head frees its first page by letting go of as many of its lowest scores as its last page holds,
and each further one by letting go of a page's worth more: the empty slots of the last page count as
scores that are lowest of all. The price of a page is the highest score that goes with it. Prices
never fall along a head, so taking the cheapest pages of all heads takes the lowest scores of each.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_policy import best


class Offers(NamedTuple):
    """The pages that heads could free, each head's in the order it would."""

    price: Float[Tensor, "N B H T"]  # highest score that goes; inf where there is no such page
    tokens: Int[Tensor, "N B H T"]  # tokens that go with it


def offers(
    score: Float[Tensor, "N B H L"],
    held: Bool[Tensor, "N B H L"],
    page: Int[Tensor, ""] | Int[Tensor, "N H"],
) -> Offers:
    """Price the pages of each head.

    Args:
        score: finite, or infinite where a token is protected.
        held: tokens of this tier.
        page: tokens in a page, or in a page of each layer and head; on the host.
    """
    places, most = score.shape[-1], -(-score.shape[-1] // int(page.min()))
    page = (page[:, None] if page.ndim else page).to(score.device, non_blocking=True)
    count = held.sum(-1)
    ascending = score.masked_fill(~held, torch.inf).sort(-1).values
    number = torch.arange(most, device=score.device)
    first = torch.where(count % page == 0, page, count % page)[..., None]
    page = page[..., None]
    last = first + number * page  # tokens gone once so many pages are free
    tokens = torch.where(number == 0, first, page).expand_as(last)
    price = ascending.gather(-1, (last - 1).clamp(max=places - 1))
    # What may go beside protected tokens frees no page: it goes when nothing else is left.
    loose = (ascending.isfinite().sum(-1, keepdim=True) - (last - tokens)).clamp(min=0)
    price = price.where(loose >= tokens, torch.finfo(price.dtype).max)
    return Offers(price.masked_fill(loose == 0, torch.inf), torch.minimum(tokens, loose))


def taken(each: list[Offers], excess: Int[Tensor, " B"]) -> list[Int[Tensor, "N B H"]]:
    """Take the cheapest pages until `excess` tokens of each sequence go with them, or none is left.

    Of equal prices, the pages that cost their heads least so far go first, heads in order, so equal
    scores everywhere are taken evenly. Protected tokens are never taken.

    Args:
        each: the offers of each tier.
        excess: tokens that are too many; heads and layers of the offers share them.

    Returns:
        Per tier and head, the tokens to let go of.
    """

    def flat(x: Tensor) -> Tensor:
        return x.permute(1, 3, 0, 2).flatten(1)  # B, pages of heads after one another

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
    """Mark what is held but for the `count` lowest scores of each head; of equal ones later go."""
    return best(score.masked_fill(~held, -torch.inf), held.sum(-1) - count) & held
