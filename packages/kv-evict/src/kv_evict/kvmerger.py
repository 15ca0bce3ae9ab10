"""KVMerger: runs of similar keys become one token."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import normalize

from kv_evict.d2o import averaged
from kv_evict.heavy_hitters import ReplannedHeavyHitters
from kv_policy import LayerView, Merge, MergeView


@dataclass(frozen=True)
class KVMerger(ReplannedHeavyHitters):
    """Drop the members of runs of similar keys first, and merge them into the run's pivot.

    A run are neighbouring tokens, each with a key whose cosine with the one before is at least
    `similar`; its pivot is the token with the most attention. A plan keeps pivots, and tokens that
    are a run alone, before other tokens, by H2O's score. A dropped token is merged into the kept
    token of its run with the most attention: its weight is the Gaussian kernel of the distance of
    both keys, over the sum of the kernels of the run, the kept token's own of 1 included. The
    kernel's width is the mean distance of those merged. A token whose run keeps none is lost.

    From the paper's abstract and a summary of other implementations. The runs, the pivot and the
    kernel are theirs; `similar`, the width, and that the budget is met by dropping are not.
    """

    name: ClassVar[str] = "kvmerger"
    source: ClassVar[str] = "KVMerger, Wang et al., 2024, https://arxiv.org/abs/2407.08454"
    reads = frozenset({"keys"})

    similar: Annotated[
        float, Meta(gt=0, le=1, description="least cosine of neighbouring keys of a run")
    ] = 0.75

    def rescore(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the scores, those of tokens that are no pivots below all others."""
        assert view.keys is not None  # they are read
        held = view.position >= 0
        score = view.score.masked_fill(~held, -torch.inf)
        pivot = _best(score, _runs(view.keys, self.similar))
        place = torch.arange(score.shape[-1], device=score.device)
        lowered = score - (1 + view.score.where(held, 0).amax(-1, keepdim=True).clamp(min=0))
        return torch.where(pivot == place, score, lowered).where(held, 0)

    def merge(self, view: MergeView) -> Merge:
        """Merge the dropped members of each run into the kept one with the most attention."""
        run = _runs(view.keys, self.similar)
        target = _best(view.score.where(view.kept, -torch.inf), run)
        into = view.dropped & view.kept.gather(-1, target)
        kept = view.keys.gather(2, target[..., None].expand_as(view.keys))
        far = (view.keys - kept).norm(dim=-1).where(into, 0)
        many = torch.zeros_like(far).scatter_add_(-1, target, into.to(far.dtype))
        width = torch.zeros_like(far).scatter_add_(-1, target, far) / many.clamp(min=1)
        near = (-((far / width.gather(-1, target)).nan_to_num(0) ** 2) / 2).exp()
        return Merge(target[..., None], *averaged(near, 1.0, target, into))


def _runs(keys: Float[Tensor, "B H L D"], similar: float) -> Int[Tensor, "B H L"]:
    """Return the number of each token's run, from 0; empty slots are runs of their own."""
    unit = normalize(keys, dim=-1)
    begins = (unit[..., 1:, :] * unit[..., :-1, :]).sum(-1) < similar
    return torch.nn.functional.pad(begins.long(), (1, 0)).cumsum(-1)


def _best(score: Float[Tensor, "B H L"], run: Int[Tensor, "B H L"]) -> Int[Tensor, "B H L"]:
    """Return for each token the index of the best of its run, the first of equal ones."""
    best = torch.full_like(score, -torch.inf).scatter_reduce(-1, run, score, "amax")
    place = torch.arange(score.shape[-1], device=score.device).expand_as(run)
    first = place.where(score == best.gather(-1, run), score.shape[-1])
    index = torch.full_like(run, score.shape[-1]).scatter_reduce(-1, run, first, "amin")
    return index.gather(-1, run)
