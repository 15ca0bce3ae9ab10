"""ThinK: prunes key channels with little weight in the logits."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float64
from msgspec import Meta
from torch import Tensor

from kv_policy import HeadBasis
from kv_svd.file import load
from kv_svd.fit import Moments
from kv_svd.fitted import Fitted

Rate = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class ThinK(Fitted):
    """Keep of each head the channels with the largest mean(q²)·mean(k²); prune the others.

    The paper scores the channels of each prompt by its last 32 queries. Here they are scored once,
    on the calibration text, so that a head stores the same channels of every token. The columns of
    the basis are columns of the identity. Values are scored by mean(v²) times the squares of the
    output projection's weights for the channel, and pruned only with `value_rate`.
    """

    name: ClassVar[str] = "think"
    source: ClassVar[str] = "ThinK, Xu et al., 2024, https://arxiv.org/abs/2407.21018"

    amounts: ClassVar[tuple[str, ...]] = ("rate",)
    amount_of: ClassVar[str] = "channels of each head's keys"

    rate: Annotated[Rate, Meta(description="share of each head's key channels to prune")] = 0.4
    value_rate: Annotated[Rate, Meta(description="share of its value channels to prune")] = 0.0
    multiple: Annotated[
        int, Meta(ge=1, description="kept channels are rounded to multiples of this")
    ] = 1

    def maps(self, layer: int) -> tuple[HeadBasis | None, HeadBasis | None]:
        """Return the channels of a layer's keys and values; None: all, unprojected."""
        found = load(self.path)[1].layers[layer]
        return (
            self._best(_score(found.query, found.keys), self.rate),
            self._best(_score(found.output, found.values), self.value_rate),
        )

    def _best(self, score: Float64[Tensor, "H D"], rate: float) -> HeadBasis | None:
        heads, dim = score.shape
        left = max(1, int(dim * (1 - rate) + 1e-9))
        rank = min(dim, max(1, left // self.multiple) * self.multiple)
        if rank == dim:
            return None
        order = score.argsort(dim=-1, descending=True, stable=True)  # the first of equal ones
        channel = order[:, :rank].sort(-1).values
        matrix = torch.zeros(heads, dim, rank).scatter_(1, channel[:, None], 1.0)
        return HeadBasis(matrix, (rank,) * heads)


def _score(asking: Moments, stored: Moments) -> Float64[Tensor, "H D"]:
    """Return the product of both mean squares, channel by channel."""
    both = (each.total.diagonal(dim1=1, dim2=2) / each.rows for each in (asking, stored))
    first, second = both
    return first * second
