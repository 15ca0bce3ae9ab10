"""The pages that a decode step reads: those in which a query may find its largest logits.

A page has bounds of its keys by channel, so a query's logits in the page are at most the sum over
channels of the larger product (Tang et al. 2024, Quest); or it has codes of its keys, which give
the logits nearly. Attention itself then reads a table with fewer pages, so every backend computes
it as over all pages.
"""

from jaxtyping import Float
from torch import Tensor

from kv_attention.backends import load_selection
from kv_attention.page_bounds import PageBounds
from kv_attention.page_selection import selected
from kv_policy import PagedTokens, PageReading


def select_pages(
    q: Float[Tensor, "B H G D"],
    pages: PagedTokens,
    bounds: PageBounds,
    reading: PageReading,
    backend: str = "torch",
) -> PagedTokens:
    """Return the pages that a decode step reads, as a table of these alone, in their order.

    Of pages with equal scores the first are read. The result is `pages` itself if all are known to
    be read; otherwise tokens have other slots in it. Synchronizes with the device once, but not at
    all with the backend `triton`, whose table has columns for the most pages that rows of up to
    `longest` tokens may read.

    Args:
        q: the query of each query head, in the basis of the stored keys.
        pages: the stored tokens of a layer.
        bounds: the bounds of their keys, or the codes.
        reading: the limit.
        backend: the backend that selects; torch does if it does not.
    """
    select = load_selection(backend)
    found = None if select is None else select(q, pages, bounds, reading)
    return found if found is not None else selected(q, pages, bounds, reading)
