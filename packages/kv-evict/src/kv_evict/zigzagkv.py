"""ZigZagKV: layers and heads get what their attention needs."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float, Int
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import spread
from kv_evict.snapkv import SnapKV
from kv_policy import LayerView, PlanView


@dataclass(frozen=True)
class ZigZagKV(SnapKV):
    """Score as SnapKV does; share the budget out by how many tokens hold `share` of the attention.

    A head's need is the least number of tokens whose attention from the window adds up to `share`
    (MBA), a layer's the mean of its heads (LMBA). Beside the window, every layer is sure of `floor`
    of the average, and the rest goes to layers by LMBA; inside a layer it goes to heads by MBA.
    The definitions and the reserve per layer are in the survey on sequence length; how large the
    reserve is, it does not say, and 0.5 is ours.
    """

    name: ClassVar[str] = "zigzagkv"
    source: ClassVar[str] = "ZigZagKV, Zhong et al., 2024, https://arxiv.org/abs/2412.09036"
    scope = "model"  # layers share one budget

    share: Annotated[float, Meta(gt=0, lt=1, description="attention a head is to keep")] = 0.9
    floor: Annotated[float, Meta(ge=0, le=1, description="of the average, sure for layers")] = 0.5

    def head_stats(self, view: LayerView) -> Float[Tensor, "B H"]:
        """Count the tokens that hold `share` of the window's attention to what is before it."""
        assert view.mass is not None  # it is observed
        older = (view.position >= 0) & (view.position < view.length[:, None, None] - self.window)
        mass = view.mass.double().masked_fill(~older, 0).sort(-1, descending=True).values
        reached = mass.cumsum(-1) < self.share * mass.sum(-1, keepdim=True)
        return (reached.sum(-1) + 1).float()

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Share the budget out by layer and head."""
        assert view.head_stats is not None  # prompts only
        need = view.head_stats.double()
        average = (view.budget - self.window).clamp(min=0).double()[:, None]
        layer = need.mean(-1, keepdim=True)  # N B 1
        layer = average * (self.floor + (1 - self.floor) * layer / layer.mean(0))
        head = layer * need / need.mean(-1, keepdim=True)
        return spread(view, self.window, head, over=(0, 2))
