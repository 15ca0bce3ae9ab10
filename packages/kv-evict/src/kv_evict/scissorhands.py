"""Scissorhands: tokens that are attended to persistently, and the newest ones."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_evict.running import running_mean
from kv_policy import Evictor, LayerView, Observe


@dataclass(frozen=True)
class Scissorhands(Evictor):
    """Keep the tokens with above-uniform attention from most queries of the history window.

    A token's score is the share of the last `window` queries after it, generated ones included,
    whose attention to it is above uniform over the tokens they see; the newest
    `recent` and the first `sinks` are always kept. Each step evicts a token once over budget.

    The KV-Compress paper (section 2.3) describes the score as a count of queries above a
    threshold. The window of 400 queries, the 10 newest tokens and the uniform threshold are from
    memory of the paper, not checked against its text. The paper's budgets per layer need a profile
    of the model and are not implemented: layers have equal budgets. The paper drops several tokens
    at a time; here one is evicted per step, which meets the budget at every step.
    """

    name: ClassVar[str] = "scissorhands"
    source: ClassVar[str] = "Scissorhands, Liu et al., 2023, https://arxiv.org/abs/2305.17118"
    decode = "step"  # each generated token evicts another once the budget is full

    window: Annotated[int, Meta(ge=1, description="queries of the history that count")] = 400
    recent: Annotated[int, Meta(ge=0, description="newest tokens, always kept")] = 10
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 0

    @property
    def observe(self) -> Observe:
        """The number of last queries with above-uniform attention."""
        return Observe(last=self.window, above=1.0, skip=1, generated=True)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the share of queries that attend to a token, and infinity for a sink."""
        carried = view.score.masked_fill(view.score.isinf(), 0)
        mean = running_mean(view, carried, self.window)
        return self.protect(mean, view)
