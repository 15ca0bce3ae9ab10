"""PyramidKV: SnapKV with more tokens in early layers than in late ones."""

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
    """Score as SnapKV does; give the last layer 1 / `beta` of the average, the first the rest.

    Beside the window, budgets fall evenly from the first layer to the last. In a prompt so short
    that the first layers could not fill theirs, the pyramid is flatter.
    """

    name: ClassVar[str] = "pyramidkv"
    source: ClassVar[str] = "PyramidKV, Cai et al., 2024, https://arxiv.org/abs/2406.02069"
    scope = "model"  # layers share one budget

    beta: Annotated[float, Meta(ge=1, description="average over what the last layer keeps")] = 20.0

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Share the budget out by layer."""
        layers = whole_tokens(pyramid(view, self.window, self.beta)) + self.window
        return layers[..., None].expand(view.score.shape[:-1])
