"""PyramidInfer's budgets: they decrease over the layers along a cosine."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Int
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import cosine, spread
from kv_evict.snapkv import SnapKV
from kv_policy import PlanView


@dataclass(frozen=True)
class PyramidInfer(SnapKV):
    """Score as SnapKV does; budgets fall from the first layer to `last_layer` of it.

    Only the budgets are PyramidInfer's. The method itself drops tokens during prefill, so that
    later layers do not compute them, which a cache cannot do. The survey on sequence length states
    that budgets fall from layer to layer; the cosine is from memory of the authors' code, not
    checked.
    """

    name: ClassVar[str] = "pyramidinfer"
    source: ClassVar[str] = "PyramidInfer, Yang et al., 2024, https://arxiv.org/abs/2405.12532"
    scope = "model"  # layers share one budget

    last_layer: Annotated[
        float, Meta(gt=0, le=1, description="budget of the last layer over that of the first")
    ] = 0.2

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Distribute the budget over layers."""
        layers = cosine(view, self.window, self.last_layer)[..., None]
        return spread(view, self.window, layers.expand(view.score.shape[:-1]), over=(0, 2))
