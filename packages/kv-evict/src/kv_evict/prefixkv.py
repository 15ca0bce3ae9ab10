"""PrefixKV: layers keep as many of their best tokens as hold the same share of attention."""

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_evict.layer_budgets import spread
from kv_evict.snapkv import SnapKV
from kv_policy import PlanView, ascending, best

_GRID: Final = 2**24  # shares are rounded, so that a batch and a single row give equal results


@dataclass(frozen=True)
class PrefixKV(SnapKV):
    """Score as SnapKV does; each layer keeps the prefix of its best tokens with one share.

    A layer's profile says which share of its scores the k best tokens of each head hold, as a mean
    over its heads. All layers keep the shortest prefixes that reach the same share, and that share
    is the largest for which the budget suffices, beside the window. The paper finds it by binary
    search; here the smallest values of all profiles, as many as the budget has tokens, give the
    same prefixes at once.

    From the paper's abstract and from memory; its code, for vision models, was not read.
    """

    name: ClassVar[str] = "prefixkv"
    source: ClassVar[str] = "PrefixKV, Wang et al., 2024, https://arxiv.org/abs/2412.03409"
    scope = "model"  # layers share one budget

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Distribute the budget over layers."""
        average = (view.budget - self.window).clamp(min=0)
        older = (view.position >= 0) & view.score.isfinite()
        score = ascending(view.score.double().masked_fill(~older, 0)).flip(-1)
        share = score.cumsum(-1) / score.sum(-1, keepdim=True).clamp(min=1e-30)
        profile = (share.mean(2) * _GRID).round()  # N B L
        most = older.sum(-1).amax(2)
        place = torch.arange(profile.shape[-1], device=profile.device)
        profile = profile.masked_fill(place >= most[..., None], torch.inf)
        layers = len(profile)
        # By place first: of equal values, layers take turns.
        every = profile.permute(1, 2, 0).flatten(1)
        taken = best(-every, average * layers) & every.isfinite()
        prefix = taken.view(*profile.permute(1, 2, 0).shape).sum(1).mT  # N B
        asked = prefix.double()[..., None].expand(view.score.shape[:-1])
        return spread(view, self.window, asked, over=(0, 2))
