"""SimLayerKV: layers that look only at both ends of the sequence keep only these."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float, UInt8
from msgspec import Meta
from torch import Tensor

from kv_evict.ends import keep_ends, step_ends
from kv_policy import Capabilities, LayerView, Observe, PlanView, Selecting, Step, StepView, protect


@dataclass(frozen=True)
class SimLayerKV(Selecting):
    """Keep sinks and the newest tokens in lazy layers, and every token in the others.

    A layer is lazy if the last query of the prompt gives more than `threshold` of its attention, on
    average over the heads, to the first `sinks` and the newest `recent` tokens. It then keeps these
    tokens, after the prompt and at every decode step. There is no budget: a layer that looks far
    back keeps every token.

    The rule and both numbers of tokens are those of a summary of the authors' code, which was not
    read; their threshold differs between models, and 0.9 is from memory.
    """

    name: ClassVar[str] = "simlayerkv"
    source: ClassVar[str] = "SimLayerKV, Zhang et al., 2024, https://arxiv.org/abs/2410.13846"
    decode = "step"  # each generated token evicts the oldest of a lazy layer
    scores_last = True  # the last query says which layers are lazy

    threshold: Annotated[
        float, Meta(ge=0, le=1, description="share of attention to both ends of a lazy layer")
    ] = 0.9
    sinks: Annotated[int, Meta(ge=0, description="first tokens of a sequence, always kept")] = 4
    recent: Annotated[int, Meta(ge=1, description="newest tokens, always kept")] = 1024

    @property
    def protected(self) -> int:
        """The sinks and the newest tokens."""
        return self.sinks + self.recent

    @property
    def observe(self) -> Observe:
        """The last query of a prompt."""
        return Observe(last=1)

    @property
    def capabilities(self) -> Capabilities:
        """All heads of a layer decide together, so heads cannot be sharded."""
        return replace(super().capabilities, splits_heads=False)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the position of a token, and infinity for a sink."""
        return protect(view.position.to(view.score.dtype), view, first=self.sinks)

    def head_stats(self, view: LayerView) -> Float[Tensor, "B H"]:
        """Return 1 in all heads of a lazy layer, else 0."""
        assert view.mass is not None  # it is observed
        mass = view.mass.double().masked_fill(view.position < 0, 0)
        newest = view.position >= view.length[:, None, None] - self.recent
        ends = mass * ((view.position < self.sinks) | newest)
        lazy = ends.sum((1, 2)) > self.threshold * mass.sum((1, 2)) + 1e-9
        return lazy.float()[:, None].expand(view.position.shape[:-1])

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Keep both ends in lazy layers, and every token in the others."""
        recent = torch.full_like(view.length, self.recent)
        return keep_ends(view, self._lazy(view), self.sinks, recent)

    def tier_thresholds(self, view: PlanView) -> Float[Tensor, "K N B H"]:
        """Return 1 in the heads of lazy layers, else 0."""
        return self._lazy(view).float()[None]

    def step(self, view: StepView) -> Step:
        """Admit the candidate, and evict the oldest token of a lazy layer."""
        lazy = view.tier_thresholds[0] > 0.5
        return step_ends(view, lazy, torch.full_like(view.length, self.recent))

    def _lazy(self, view: PlanView) -> Bool[Tensor, "N B H"]:
        assert view.head_stats is not None  # prompts only
        return view.head_stats > 0.5
