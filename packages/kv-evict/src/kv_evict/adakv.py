"""Ada-KV: the heads of a layer share its budget, in SnapKV and in PyramidKV."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from jaxtyping import Int
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import adaptive, pyramid, spread
from kv_evict.pyramidkv import PyramidKV
from kv_evict.snapkv import SnapKV
from kv_policy import Capabilities, PlanView, whole_tokens

Floor = Annotated[float, Meta(ge=0, le=1, description="of the average, sure for every head")]


@dataclass(frozen=True)
class AdaSnapKV(SnapKV):
    """Score as SnapKV does; keep the best tokens of a layer, whosever they are.

    A head is sure of the window and of `floor` of the average beside it.
    """

    name: ClassVar[str] = "ada-snapkv"
    source: ClassVar[str] = "Ada-KV, Feng et al., 2024, https://arxiv.org/abs/2407.11550"

    floor: Floor = 0.2

    @property
    def capabilities(self) -> Capabilities:
        """Heads of a layer share their budget, so a shard of them decides otherwise."""
        return replace(super().capabilities, splits_heads=False)

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Share each layer's budget out by head."""
        average = (view.budget - self.window).clamp(min=0).double()
        average = average.expand(view.score.shape[0], -1)
        asked = adaptive(view, average, self.floor)
        return spread(view, self.window, asked, over=(2,))


@dataclass(frozen=True)
class AdaPyramidKV(PyramidKV):
    """Score as SnapKV does, share layers out as PyramidKV does, and heads as Ada-SnapKV does."""

    name: ClassVar[str] = "ada-pyramidkv"
    source: ClassVar[str] = "Ada-KV, Feng et al., 2024, https://arxiv.org/abs/2407.11550"

    floor: Floor = 0.2

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Share the budget out by layer, and then by head."""
        average = whole_tokens(pyramid(view, self.window, self.beta)).double()
        asked = adaptive(view, average, self.floor)
        return spread(view, self.window, asked, over=(0, 2))
