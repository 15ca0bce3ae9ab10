"""FastGen: each head uses the cheapest strategy that recovers its attention."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, UInt8
from msgspec import Meta
from torch import Tensor

from kv_evict.layer_budgets import share_of
from kv_evict.running import running_mean
from kv_policy import (
    DROP,
    NOBODY,
    LayerView,
    Observe,
    PlanView,
    Selecting,
    Step,
    StepView,
    best,
)

Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class FastGen(Selecting):
    """Profile each head on its prompt, and keep the fewest tokens with `recovery` of attention.

    Strategies, in order of cost: the first `sinks` tokens; these and the newest `local` of the
    sequence, or these and the `frequent` share of the most attended; all three; every token. There
    is no budget: a head with dispersed attention keeps every token. During generation, a head keeps
    the share of its tokens that it kept of the prompt, and evicts the least attended.

    The survey on sequence length describes the strategies and their order. Special tokens and
    punctuation are recognised by their text, which a cache does not have; the first tokens stand in
    for special ones, and punctuation is left out. Heads are profiled on the last `window`
    queries. The values of `recovery`, `local` and `frequent` are from memory, not checked.
    """

    name: ClassVar[str] = "fastgen"
    source: ClassVar[str] = "FastGen, Ge et al., 2023, https://arxiv.org/abs/2310.01801"
    decode = "step"  # heads keep their share of the prompt during generation

    recovery: Annotated[
        float, Meta(gt=0, le=1, description="share of a head's attention to keep")
    ] = 0.95
    local: Annotated[Share, Meta(description="newest tokens, as a share of the sequence")] = 0.3
    frequent: Annotated[Share, Meta(description="most attended, as a share of the sequence")] = 0.3
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 4
    window: Annotated[int, Meta(ge=1, description="last queries of a prompt to observe")] = 64

    @property
    def observe(self) -> Observe:
        """The last queries of a prompt and every generated one."""
        return Observe(last=self.window, skip=1, generated=True)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the mean attention a token receives, at most 1; a sink scores 1 more."""
        sink = (view.position >= 0) & (view.position < self.sinks)
        return running_mean(view, view.score - sink.float(), self.window) + sink

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Choose each head's strategy and keep its tokens."""
        here = view.position >= 0
        sink = here & (view.position < self.sinks)
        newest = (view.length - share_of(view.length, self.local))[None, :, None, None]
        local = here & (view.position >= newest)
        most = share_of(view.length, self.frequent)[None, :, None]
        weight = (view.score.double() - sink.double()).masked_fill(~here, 0)
        rest = weight.masked_fill(~here | sink, -torch.inf)
        frequent = best(rest, most.expand(here.shape[:-1])) & here & ~sink
        total = weight.sum(-1)
        keep, done = here, torch.zeros_like(total, dtype=torch.bool)
        for kind in (sink, sink | local, sink | frequent, sink | local | frequent):
            held = ((weight * kind).sum(-1) >= self.recovery * total) & (total > 0)
            keep = torch.where((held & ~done)[..., None], kind, keep)
            done |= held
        return torch.where(keep, 0, DROP).to(torch.uint8)

    def tier_thresholds(self, view: PlanView) -> Float[Tensor, "K N B H"]:
        """Return the share of seen tokens that a head kept; 1 where it evicts none."""
        kept, here = self.plan(view) != DROP, view.position >= 0
        share = kept.sum(-1) / view.length[None, :, None].clamp(min=1)
        return share.masked_fill((kept == here).all(-1), 1).float()[None]

    def step(self, view: StepView) -> Step:
        """Admit the candidate; evict the weakest where a head holds more than its share."""
        share = view.length[None, :, None] * view.tier_thresholds[0].double()
        # Thresholds are float32: values that are whole up to its rounding count as whole.
        enough = view.count[0] >= (share - (share * 2**-22).clamp(min=1e-3)).ceil()
        victim = torch.where(
            enough & (view.count[0] > 0) & (view.tier_thresholds[0] < 1), 0, NOBODY
        )
        victim = victim.to(torch.uint8)
        return Step(torch.zeros_like(victim), victim, torch.full_like(victim, DROP))
