"""KVCrush: a part of the budget is for tokens that stand for others which heads treat alike."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Int, UInt8
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import share_of
from kv_evict.snapkv import SnapKV
from kv_policy import DROP, Capabilities, PlanView, best


@dataclass(frozen=True)
class KVCrush(SnapKV):
    """Keep SnapKV's best tokens, and of the others some of every kind, `budget` in all.

    A token's bits say which heads of its layer would keep it within the budget. The tokens that a
    head does not keep are sorted by the number of bits in which they differ from an anchor, and cut
    into as many equal buckets as tokens may stand for others: `share` of the budget beside the
    window. The last token of each bucket is kept. The anchor has the bits of the majority of tokens
    (`mean`), or every second bit (`alternating`).

    From the paper's abstract and a summary of other implementations. There bits are of query heads
    and a layer's heads keep the same tokens; here they are of KV heads, each of which sorts the
    tokens it would lose. Bits of a token are those of the heads that hold it.
    """

    name: ClassVar[str] = "kvcrush"
    source: ClassVar[str] = "KVCrush, Jha et al., 2025, https://arxiv.org/abs/2503.00022"

    share: Annotated[
        float, Meta(ge=0, le=1, description="part of the budget for tokens that stand for others")
    ] = 0.25
    anchor: Annotated[
        Literal["mean", "alternating"], Meta(description="bits that tokens are compared with")
    ] = "mean"

    @property
    def capabilities(self) -> Capabilities:
        """A token's bits are of all heads of its layer, so heads cannot be sharded."""
        return replace(super().capabilities, splits_heads=False)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Keep the best tokens of each head, and one of every bucket of the others."""
        held, count = view.position >= 0, self.counts(view)
        score = view.score.masked_fill(~held, -torch.inf)
        bits = best(score, count) & held
        stand = share_of(view.budget - self.window, self.share).clamp(min=0)[None, :, None]
        keep = best(score, count - stand) & held
        rest = held & ~keep
        far = self._differing(bits, held, view.position)
        last = torch.iinfo(torch.int64).max
        key = (far * (1 << 40) + view.position).masked_fill(~rest, last)
        rank, total = key.argsort(-1).argsort(-1), rest.sum(-1, keepdim=True).clamp(min=1)
        buckets = stand[..., None].minimum(total)
        keep |= rest & ((rank + 1) * buckets // total > rank * buckets // total)
        return torch.where(keep, 0, DROP).to(torch.uint8)

    def _differing(
        self,
        bits: Bool[Tensor, "N B H L"],
        held: Bool[Tensor, "N B H L"],
        position: Int[Tensor, "N B H L"],
    ) -> Int[Tensor, "N B H L"]:
        """Return in how many bits each token differs from the anchor, over heads that hold it."""
        if self.anchor == "mean":
            anchor = 2 * bits.sum(-1, keepdim=True) > held.sum(-1, keepdim=True)
        else:
            anchor = (torch.arange(bits.shape[2], device=bits.device) % 2 == 1)[:, None]
        differs = ((bits != anchor) & held).flatten(2).long()
        flat = position.flatten(2).contiguous()
        # A position's number is the index of its first token in sorted order, as in chunkkv.
        number = torch.searchsorted(flat.sort(-1).values, flat)
        total = torch.zeros_like(differs).scatter_add_(-1, number, differs)
        return total.gather(-1, number).view_as(position)
