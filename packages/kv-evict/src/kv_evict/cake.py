"""CAKE: larger budgets for layers whose attention is dispersed and changes over time."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import spread
from kv_evict.snapkv import SnapKV
from kv_policy import LayerView, Observe, PlanView


@dataclass(frozen=True)
class CAKE(SnapKV):
    """Keep tokens of high or changing attention; distribute the budget by layer preference.

    A layer's preference is H^(1/tau1) V^(1/tau2): H is the entropy of the window's attention and V
    its variance over the window's queries, both summed over heads. A token's score is the mean of
    the window's attention plus `gamma` times its variance, pooled. The formulas are those of
    `modify_llama.py` and `cake_cache.py` in a copy of the authors' code, read; gamma=200 and
    tau1=tau2=1 are from memory, not checked.

    Variances are taken over the queries of all query heads of a KV head together, where the authors
    compute them per query head and average: attention is summed per KV head here. Scores are
    pooled over as many positions as SnapKV's; the authors pool over 5.
    """

    name: ClassVar[str] = "cake"
    source: ClassVar[str] = "CAKE, Qin et al., 2025, https://arxiv.org/abs/2503.12491"
    scope = "model"  # layers share one budget

    gamma: Annotated[float, Meta(ge=0, description="weight of the variance in a score")] = 200.0
    tau1: Annotated[float, Meta(gt=0, description="temperature of the entropy")] = 1.0
    tau2: Annotated[float, Meta(gt=0, description="temperature of the variance")] = 1.0

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        if self.group != "mean":
            raise ValueError(
                f"{self.name}: group={self.group}, but variances need group=mean; remove it"
            )

    @property
    def observe(self) -> Observe:
        """The last queries, with entropy and squares."""
        return replace(super().observe, also=frozenset({"entropy", "squares"}))

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Add the weighted variance to the mean, and score as SnapKV does."""
        assert view.mass is not None  # it is observed
        assert view.seen is not None
        return super().score(
            replace(view, mass=view.mass + self.gamma * _variance(view) * view.seen)
        )

    def head_stats(self, view: LayerView) -> Float[Tensor, "B H"]:
        """Return the layer's preference, the same for all its heads."""
        older = (view.position >= 0) & (view.position < view.length[:, None, None] - self.window)
        entropy = view.also["entropy"].double().masked_fill(~older, 0).sum((1, 2))
        variance = _variance(view).double().masked_fill(~older, 0).sum((1, 2))
        preference = entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)
        return preference.float()[:, None].expand(view.score.shape[:-1])

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Distribute the budget over layers; evenly where no layer has a preference."""
        assert view.head_stats is not None  # prompts only
        average = (view.budget - self.window).clamp(min=0).double()[:, None]
        mean = view.head_stats.double().mean(0)
        part = torch.where(mean > 0, view.head_stats.double() / mean, 1)
        return spread(view, self.window, average * part, over=(0, 2))


def _variance(view: LayerView) -> Float[Tensor, "B H L"]:
    """Return the unbiased variance of a token's attention over the queries that saw it."""
    assert view.mass is not None
    assert view.seen is not None
    seen, group = view.seen.to(view.mass.dtype), view.shape.group
    mean = view.mass / seen.clamp(min=1)
    spread_out = group * (view.also["squares"] - mean * view.mass).clamp(min=0)
    return spread_out / (group * seen - 1).clamp(min=1)
