"""Stored tokens of one layer for timing attention: pages in random order, filled by the codecs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kv_paging import PagePool, TokenStore, back_with_huge_pages
from kv_policy import CacheShape, PagedTokens, PageLayout, TokenFormat, parse, tier_formats

PAGE_BYTES = 13_312  # 64 tokens of k8v4 or 128 of k4v2 with 128 dimensions a head


@dataclass(frozen=True)
class Heads:
    """The heads of a layer."""

    query: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query // self.kv

    def format(self, spec: str) -> TokenFormat:
        """How a policy's first tier stores a token."""
        shape = CacheShape(1, self.kv, self.group, self.dim, self.dim, torch.bfloat16)
        return tier_formats(parse(spec), shape)[0]


def random_vectors(heads: Heads, sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, L, D] in bfloat16, the same in every run.

    Sequences repeat the first one's vectors in memory of their own.
    """
    torch.manual_seed(0)
    one = torch.randn(2, 1, heads.kv, tokens, heads.dim).to(torch.bfloat16)
    key, value = one.expand(-1, sequences, -1, -1, -1).contiguous()
    return key, value


def stored(
    form: TokenFormat,
    key: Tensor,
    value: Tensor,
    page_bytes: int = PAGE_BYTES,
    huge: bool = False,
) -> PagedTokens:
    """Store the vectors of a layer in pages whose order in memory is random.

    `huge` backs them with huge pages, as a pool of pages does.
    """
    sequences, heads, tokens, _ = key.shape
    layout = PageLayout.fitted(form, page_bytes)
    pages = sequences * heads * -(-tokens // layout.tokens)
    pool = PagePool(page_bytes, pages, grows=False)
    store = TokenStore(pool, layout, 1, sequences, heads)
    for b in range(sequences):  # one at a time: what a codec needs for them stays small
        at = torch.arange(b * heads, (b + 1) * heads)
        keep = torch.ones(heads, tokens, dtype=torch.bool)
        store.append(at, key[b], value[b], keep)
    view = store.view(0)
    order = torch.randperm(pages)
    data = torch.empty_like(view.data)
    if huge:
        back_with_huge_pages(data)
    data[order] = view.data
    return replace(view, data=data, table=order[view.table.long()].to(view.table.dtype))


def tiers(
    heads: Heads,
    specs: Sequence[tuple[str, float]],
    key: Tensor,
    value: Tensor,
    huge: bool = False,
) -> list[PagedTokens]:
    """Store consecutive shares of the tokens in a format each."""
    ends = torch.tensor([share for _, share in specs]).cumsum(0) * key.shape[2]
    stops = ends.round().int().tolist()
    return [
        stored(heads.format(spec), key[:, :, a:b], value[:, :, a:b], huge=huge)
        for (spec, _), a, b in zip(specs, [0, *stops[:-1]], stops, strict=True)
    ]


def token_bytes(pages: Sequence[PagedTokens]) -> int:
    """Bytes of codes and scales that a step reads."""
    return sum(int(part.length.sum()) * part.layout.format.nbytes for part in pages)
