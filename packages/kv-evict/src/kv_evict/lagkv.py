"""LagKV: tokens with the largest variation relative to the following chunk."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_evict.rounding import rounded
from kv_policy import Evictor, LayerView, ascending_order


@dataclass(frozen=True)
class LagKV(Evictor):
    """Keep the tokens of each chunk of `lag` that vary most on the scale of the next chunk.

    Each channel is scaled by its range in the next chunk. Standard deviations over channels, after
    a softmax over the chunk, are summed for key and value; the score is the rank in the chunk,
    computed from 12 bits. Sinks, and tokens without a whole following chunk, are kept. Not compared
    with other code.
    """

    name: ClassVar[str] = "lagkv"
    source: ClassVar[str] = "LagKV, Liang et al., 2025, https://arxiv.org/abs/2504.04704"
    reads = frozenset({"keys", "values"})
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 4
    lag: Annotated[int, Meta(ge=2, description="tokens per chunk, scaled by the next")] = 128

    @property
    def protected(self) -> int:
        """The sinks, and the maximum of tokens without a whole following chunk."""
        return self.sinks + 2 * self.lag - 1

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Rank each token in its chunk; return infinity without a whole following chunk."""
        assert view.keys is not None  # they are read
        assert view.values is not None
        held = (view.position >= 0).sum(-1, keepdim=True) - self.sinks
        spread = _spread(view.keys[:, :, self.sinks :], self.lag)
        spread = spread + _spread(view.values[:, :, self.sinks :], self.lag)
        order = ascending_order(-rounded(spread))
        rank = -order.argsort().flatten(2).float()
        place = torch.arange(rank.shape[2], device=rank.device)
        rank = rank.masked_fill(place >= held - held % self.lag - self.lag, torch.inf)
        score = torch.full_like(view.score, torch.inf)
        score[:, :, self.sinks : self.sinks + len(place)] = rank
        return score


def _spread(x: Float[Tensor, "B H L D"], size: int) -> Float[Tensor, "B H C S"]:
    """Return a token's variation on the scale of the next chunk, after softmax; omit the last."""
    count = x.shape[2] // size
    if count < 2:
        return x.new_zeros(*x.shape[:2], 0, size)
    chunk = x[:, :, : count * size].unflatten(2, (count, size))
    low, high = chunk[:, :, 1:].aminmax(dim=3, keepdim=True)
    scaled = ((chunk[:, :, :-1] - low) / (high - low)).masked_fill(high == low, 0)
    spread: Tensor = scaled.std(-1).softmax(-1)
    return spread
