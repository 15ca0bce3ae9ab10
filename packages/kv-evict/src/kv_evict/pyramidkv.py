"""PyramidKV: SnapKV with larger budgets in early layers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Int
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import pyramid
from kv_evict.snapkv import SnapKV
from kv_policy import PlanView, whole_tokens


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Score as SnapKV does; the last layer keeps 1 / `beta` of the average, the first most.

    Beside the window, budgets fall linearly from the first layer to the last. If a prompt is too
    short for the budgets of the first layers, the pyramid is flatter.
    """

    name: ClassVar[str] = "pyramidkv"
    source: ClassVar[str] = "PyramidKV, Cai et al., 2024, https://arxiv.org/abs/2406.02069"
    scope = "model"  # layers share one budget

    beta: Annotated[float, Meta(ge=1, description="average over the last layer's budget")] = 20.0

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Distribute the budget over layers."""
        layers = whole_tokens(pyramid(view, self.window, self.beta)) + self.window
        return layers[..., None].expand(view.score.shape[:-1])
