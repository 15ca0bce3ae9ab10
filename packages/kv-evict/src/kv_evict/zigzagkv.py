"""ZigZagKV: budgets of layers and heads follow their attention."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float, Int
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import spread
from kv_evict.snapkv import SnapKV
from kv_policy import LayerView, PlanView, ascending


@dataclass(frozen=True)
class ZigZagKV(SnapKV):
    """Score as SnapKV does; budgets follow the number of tokens with `share` of the attention.

    A head's need is the least number of tokens whose attention from the window adds up to `share`
    (MBA), a layer's the mean of its heads (LMBA). Beside the window, every layer keeps at least
    `floor` of the average, and the rest is distributed over layers by LMBA; within a layer it is
    distributed over heads by MBA. The definitions and the reserve per layer are in the survey on
    sequence length, which does not give the size of the reserve; 0.5 is ours.
    """

    name: ClassVar[str] = "zigzagkv"
    source: ClassVar[str] = "ZigZagKV, Zhong et al., 2024, https://arxiv.org/abs/2412.09036"
    scope = "model"  # layers share one budget

    share: Annotated[float, Meta(gt=0, lt=1, description="share of a head's attention")] = 0.9
    floor: Annotated[
        float, Meta(ge=0, le=1, description="minimum per layer, as share of the average")
    ] = 0.5

    def head_stats(self, view: LayerView) -> Float[Tensor, "B H"]:
        """Return the number of tokens with `share` of the window's attention to earlier tokens."""
        assert view.mass is not None  # it is observed
        older = (view.position >= 0) & (view.position < view.length[:, None, None] - self.window)
        mass = ascending(view.mass.double().masked_fill(~older, 0)).flip(-1)
        reached = mass.cumsum(-1) < self.share * mass.sum(-1, keepdim=True)
        return (reached.sum(-1) + 1).float()

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Distribute the budget over layers and heads."""
        assert view.head_stats is not None  # prompts only
        need = view.head_stats.double()
        average = (view.budget - self.window).clamp(min=0).double()[:, None]
        layer = need.mean(-1, keepdim=True)  # N B 1
        layer = average * (self.floor + (1 - self.floor) * layer / layer.mean(0))
        head = layer * need / need.mean(-1, keepdim=True)
        return spread(view, self.window, head, over=(0, 2))
