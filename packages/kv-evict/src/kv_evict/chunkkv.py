"""ChunkKV: whole chunks of neighbouring tokens stay, the same in all heads of a layer."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from msgspec import Meta
from torch import Tensor

from kv_evict.snapkv import SnapKV
from kv_policy import Capabilities, LayerView


@dataclass(frozen=True)
class ChunkKV(SnapKV):
    """Keep the last `window` tokens, and the chunks of `chunk` positions that they look at most.

    Tokens before the window are of one chunk if their positions, divided by `chunk`, give the same
    whole number. A chunk's score is the mean of SnapKV's over those of its tokens that are there,
    in all heads of the layer, so heads that hold the same tokens keep the same chunks. Of the chunk
    that the budget has no room for as a whole, the first tokens stay: the budget is met exactly.

    The paper adds a chunk's scores up, which counts against one that is not whole, and lets layers
    take over the choice of another, which is not done here. Its chunks are of 10, as here. Scores
    are pooled over 21 positions before, as in SnapKV here; `pool=1` leaves that out.
    """

    name: ClassVar[str] = "chunkkv"
    source: ClassVar[str] = "ChunkKV, Liu et al., 2025, https://arxiv.org/abs/2502.00299"

    chunk: Annotated[
        int, Meta(ge=1, description="positions of a chunk, which stays or goes as a whole")
    ] = 10

    @property
    def capabilities(self) -> Capabilities:
        """All heads of a layer decide together, so none can be alone on a shard."""
        return replace(super().capabilities, splits_heads=False)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Give a token the mean that SnapKV gives its chunk, and those in the window infinity."""
        score = super().score(view)
        if view.mass is None:
            return score
        older = (view.position >= 0) & (view.position < view.length[:, None, None] - self.window)
        return torch.where(older, means(score, view.position, older, self.chunk), score)


def means(
    score: Float[Tensor, "B H L"],
    position: Int[Tensor, "B H L"],
    counts: Bool[Tensor, "B H L"],
    size: int,
) -> Float[Tensor, "B H L"]:
    """Give each token the mean score of its chunk, over the tokens of all heads that count.

    Args:
        score: one number per token.
        position: says which chunk a token is of; in any order, and of each head other ones.
        counts: tokens that are of a chunk; what the others get means nothing.
        size: positions of a chunk.
    """
    none = torch.iinfo(position.dtype).max  # one more chunk, of the tokens that do not count
    chunk = (position // size).masked_fill(~counts, none).flatten(1).contiguous()
    # A chunk is known by the place of its first token among all, sorted: how many chunks there are
    # need not be known, so nothing waits for the device.
    number = torch.searchsorted(chunk.sort(dim=1).values, chunk)
    given = score.flatten(1).double()
    total = torch.zeros_like(given).scatter_add_(1, number, given)
    tokens = torch.zeros_like(given).scatter_add_(1, number, torch.ones_like(given))
    mean = (total / tokens).gather(1, number)
    return mean.view_as(score).to(score.dtype)
