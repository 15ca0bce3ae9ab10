"""ChunkKV: keeps whole chunks of neighbouring tokens, the same in all heads of a layer."""

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
    """Keep the last `window` tokens, and the chunks of `chunk` positions they attend to most.

    Tokens before the window are in the same chunk if their positions, divided by `chunk`, give the
    same whole number. A chunk's score is the mean of SnapKV's over its stored tokens in all heads
    of the layer, so heads that hold the same tokens keep the same chunks. If the last chunk does
    not fit into the budget as a whole, its first tokens are kept: the budget is met exactly.

    The paper sums a chunk's scores, which penalizes an incomplete chunk, and lets layers reuse the
    chunks of another layer, which is not implemented. Its chunks have 10 tokens, as here. Scores
    are pooled over 21 positions before, as in SnapKV here; `pool=1` disables that.
    """

    name: ClassVar[str] = "chunkkv"
    source: ClassVar[str] = "ChunkKV, Liu et al., 2025, https://arxiv.org/abs/2502.00299"

    chunk: Annotated[
        int, Meta(ge=1, description="positions per chunk, which is kept or dropped as a whole")
    ] = 10

    @property
    def capabilities(self) -> Capabilities:
        """All heads of a layer decide together, so heads cannot be sharded."""
        return replace(super().capabilities, splits_heads=False)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the mean SnapKV score of a token's chunk, and infinity inside the window."""
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
    """Return each token's mean score over its chunk and all heads, of the tokens in `counts`.

    Args:
        score: one number per token.
        position: determines the chunk of a token; in any order, and may differ between heads.
        counts: tokens that belong to a chunk; the result of the others is undefined.
        size: positions per chunk.
    """
    none = torch.iinfo(position.dtype).max  # one more chunk, for the tokens that do not count
    chunk = (position // size).masked_fill(~counts, none).flatten(1).contiguous()
    # A chunk's number is the index of its first token in sorted order, so the number of chunks is
    # never needed and nothing synchronizes with the device.
    number = torch.searchsorted(chunk.sort(dim=1).values, chunk)
    given = score.flatten(1).double()
    total = torch.zeros_like(given).scatter_add_(1, number, given)
    tokens = torch.zeros_like(given).scatter_add_(1, number, torch.ones_like(given))
    mean = (total / tokens).gather(1, number)
    return mean.view_as(score).to(score.dtype)
