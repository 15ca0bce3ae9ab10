"""FastGen: each head keeps the cheapest kind of tokens that holds its attention."""

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
    """Profile each head on its prompt, and keep the least that recovers `recovery` of attention.

    From cheap to dear: the first `sinks` tokens; these and the newest `local` of the sequence, or
    these and the `frequent` share of the most attended; all three; everything. There is no budget:
    a head that looks at everything keeps everything. While generating, a head keeps the share of
    its tokens that it kept of the prompt, and lets the least attended go.

    The survey on sequence length describes the strategies and the order of work. Special tokens
    and punctuation are told by what they say, which a cache does not know; the first tokens stand
    for the special ones, and punctuation is left out. Heads are profiled on the last `window`
    queries. The values of `recovery`, `local` and `frequent` are from memory, not checked.
    """

    name: ClassVar[str] = "fastgen"
    source: ClassVar[str] = "FastGen, Ge et al., 2023, https://arxiv.org/abs/2310.01801"
    decode = "step"  # heads that dropped a share of the prompt go on so

    recovery: Annotated[
        float, Meta(gt=0, le=1, description="share of a head's attention that is to be kept")
    ] = 0.95
    local: Annotated[Share, Meta(description="newest tokens, as a share of the sequence")] = 0.3
    frequent: Annotated[Share, Meta(description="most attended, as a share of the sequence")] = 0.3
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 4
    window: Annotated[int, Meta(ge=1, description="queries of a prompt that are watched")] = 64

    @property
    def observe(self) -> Observe:
        """The last queries of a prompt and every generated one."""
        return Observe(last=self.window, skip=1, generated=True)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Average the attention that a token gets, which is at most 1; a sink gets 1 more."""
        sink = (view.position >= 0) & (view.position < self.sinks)
        return running_mean(view, view.score - sink.float(), self.window) + sink

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Choose each head's strategy and keep what it keeps."""
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
        """The share that a head kept of the tokens seen; 1 where it lets none go."""
        kept, here = self.plan(view) != DROP, view.position >= 0
        share = kept.sum(-1) / view.length[None, :, None].clamp(min=1)
        return share.masked_fill((kept == here).all(-1), 1).float()[None]

    def step(self, view: StepView) -> Step:
        """Take the candidate in; let the weakest go where a head holds more than its share."""
        share = view.length[None, :, None] * view.tier_thresholds[0].double()
        # Cuts are kept in float32: what is whole but for that is whole.
        enough = view.count[0] >= (share - (share * 2**-22).clamp(min=1e-3)).ceil()
        victim = torch.where(
            enough & (view.count[0] > 0) & (view.tier_thresholds[0] < 1), 0, NOBODY
        )
        victim = victim.to(torch.uint8)
        return Step(torch.zeros_like(victim), victim, torch.full_like(victim, DROP))
