"""CaM: values of dropped tokens are spread over the kept tokens that follow."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_evict.heavy_hitters import ReplannedHeavyHitters
from kv_evict.nearest import first_kept
from kv_policy import Merge, MergeView


@dataclass(frozen=True)
class CaM(ReplannedHeavyHitters):
    """Keep H2O's tokens, and add values of dropped tokens to those of the next kept ones.

    A dropped token's value is added to the next `targets` kept tokens by position, divided by
    their number, with the probability of its attention over their mean attention, at most 1. Keys
    stay. Here each addition is weighted by the probability, which is what the authors draw on
    average; with a `seed` it is drawn, by a hash of layer, head and position.

    The formula is that of `modify_llama_cam.py` of the authors' repository and of `cam_press.py`
    of kvpress, read; there a decode step drops a token, and its attention is that of one query or
    of all generated ones.
    """

    name: ClassVar[str] = "cam"
    source: ClassVar[str] = "CaM, Zhang et al., 2024, https://openreview.net/forum?id=LCTmppB165"

    targets: Annotated[
        int, Meta(ge=1, description="following kept tokens that a value is added to")
    ] = 32
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="seed of the draws; none: additions are weighted by their probability"),
    ] = None

    def merge(self, view: MergeView) -> Merge:
        """Add values to the next kept tokens."""
        place, kept = first_kept(view.kept), view.kept.long()
        number = kept.cumsum(-1)[..., None] + torch.arange(self.targets, device=kept.device)
        there = number < kept.sum(-1)[..., None, None]
        lead = (*kept.shape[:2], -1)
        number = number.clamp(max=place.shape[-1] - 1).flatten(2)
        target = place.gather(-1, number).view_as(there)
        # Protected tokens of other selectors have infinite scores, and only attention is positive.
        score = view.score.where((view.position >= 0) & view.score.isfinite(), 0).clamp(min=0)
        given = there & view.score.gather(-1, target.flatten(2)).view_as(there).isfinite()
        around = score.gather(-1, target.flatten(2)).view_as(there)
        mean = around.where(given, 0).sum(-1) / given.sum(-1).clamp(min=1)
        chance = (score / mean).nan_to_num(nan=0.0, posinf=1.0).clamp(max=1)
        if self.seed is not None:
            chance = (_uniform(view, self.seed) < chance).to(chance.dtype)
        weight = there * (chance / there.sum(-1).clamp(min=1))[..., None]
        return Merge(target.view(*lead, self.targets), weight, keys=False)


def _uniform(view: MergeView, seed: int) -> Float[Tensor, "B H L"]:
    """Return numbers in [0, 1): hashes of layer, head and position (Murmur3's finalizer)."""
    head = view.shape.first_head + torch.arange(view.position.shape[1], device=view.position.device)
    x = view.position.long().clamp(min=0) * 0x9E3779B1
    x = (
        x
        + (view.layer[:, None] * 0x85EBCA77 + head * 0xC2B2AE3D)[..., None]
        + seed * 0x27D4EB2F % 2**32
    )
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = x & 0xFFFFFFFF
        x = (x ^ (x >> shift)) * factor
    return (x & 0xFFFFFFFF).double().div(2**32).float().clamp(max=1 - 2**-24)
