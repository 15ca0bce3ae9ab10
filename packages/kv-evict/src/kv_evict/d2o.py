"""D2O: dropped tokens that are like a kept one are merged into it."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from msgspec import Meta
from torch import Tensor

from kv_evict.heavy_hitters import ReplannedHeavyHitters
from kv_evict.nearest import nearest
from kv_policy import Merge, MergeView


@dataclass(frozen=True)
class D2O(ReplannedHeavyHitters):
    """Keep H2O's tokens, and merge a dropped token into the kept one with the nearest key.

    The nearest key has the largest cosine u. A token is merged if u reaches its head's threshold:
    the mean of u over the tokens that the first plan drops, and after that the average of the mean
    of each plan, weighted `beta`, and of the threshold before. A kept token then has the mean of
    its vectors, weighted by e, and of those merged into it, weighted by e^u. The others are lost.

    Threshold, `beta` and the four sinks are those of the authors' `modeling_llama3_7b_13b_d2o.py`,
    read; there a token is merged in all heads or in none, and each step drops one. The
    weights and the share of `recent` tokens are the paper's, from memory: the code averages vectors
    that it multiplies by u. Budgets of layers are left out.
    """

    name: ClassVar[str] = "d2o"
    source: ClassVar[str] = "D2O, Wan et al., 2024, https://arxiv.org/abs/2406.13035"
    sinks = 4

    recent: Annotated[
        float, Meta(ge=0, le=1, description="share of the budget for the newest tokens")
    ] = 0.25
    beta: Annotated[
        float, Meta(ge=0, le=1, description="weight of a plan's mean cosine in the threshold")
    ] = 0.5

    def merge(self, view: MergeView) -> Merge:
        """Merge tokens into the kept ones that are nearest, if they are near enough."""
        dropped = view.dropped
        cosine, target = nearest(view.keys, view.kept)
        dropped &= cosine.isfinite()
        mean = cosine.where(dropped, 0).sum(-1) / dropped.sum(-1).clamp(min=1)
        after = torch.lerp(view.threshold, mean, self.beta).where(view.threshold != 0, mean)
        threshold = after.where(dropped.any(-1), view.threshold)
        into = dropped & (cosine >= threshold[..., None])
        return Merge(
            target[..., None], *averaged(cosine.exp(), torch.e, target, into), threshold=threshold
        )


def averaged(
    share: Float[Tensor, "B H L"],
    own: float,
    target: Int[Tensor, "B H L"],
    into: Bool[Tensor, "B H L"],
) -> tuple[Float[Tensor, "B H L 1"], Float[Tensor, "B H L"]]:
    """Return the weights of a mean of each target and of what is merged into it.

    Args:
        share: of each token in the sum of its target.
        own: the target's.
        target: the index of a kept token.
        into: the tokens that are merged.

    Returns:
        Weights of the merged tokens, 0 of others, and those of the targets themselves.
    """
    share, place = share.where(into, 0), target.where(into, 0)
    total = torch.full_like(share, own).scatter_add_(-1, place, share)
    return (share / total.gather(-1, place))[..., None], own / total
