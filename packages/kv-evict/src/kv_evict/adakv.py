"""Ada-KV: adaptive head budgets within a layer, for SnapKV and PyramidKV."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from jaxtyping import Int
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import adaptive, pyramid, spread
from kv_evict.pyramidkv import PyramidKV
from kv_evict.snapkv import SnapKV
from kv_policy import Capabilities, PlanView, whole_tokens

Floor = Annotated[float, Meta(ge=0, le=1, description="minimum per head, as share of the average")]


@dataclass(frozen=True)
class AdaSnapKV(SnapKV):
    """Score as SnapKV does; keep the best tokens of a layer, in any of its heads.

    A head keeps at least the window and `floor` of the average beside it.
    """

    name: ClassVar[str] = "ada-snapkv"
    source: ClassVar[str] = "Ada-KV, Feng et al., 2024, https://arxiv.org/abs/2407.11550"

    floor: Floor = 0.2

    @property
    def capabilities(self) -> Capabilities:
        """Heads of a layer share their budget, so a shard of them decides differently."""
        return replace(super().capabilities, splits_heads=False)

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Distribute each layer's budget over its heads."""
        average = (view.budget - self.window).clamp(min=0).double()
        average = average.expand(view.score.shape[0], -1)
        asked = adaptive(view, average, self.floor)
        return spread(view, self.window, asked, over=(2,))


@dataclass(frozen=True)
class AdaPyramidKV(PyramidKV):
    """Score as SnapKV does; distribute over layers as PyramidKV and over heads as Ada-SnapKV."""

    name: ClassVar[str] = "ada-pyramidkv"
    source: ClassVar[str] = "Ada-KV, Feng et al., 2024, https://arxiv.org/abs/2407.11550"

    floor: Floor = 0.2

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Distribute the budget over layers, then over heads."""
        average = whole_tokens(pyramid(view, self.window, self.beta)).double()
        asked = adaptive(view, average, self.floor)
        return spread(view, self.window, asked, over=(0, 2))
