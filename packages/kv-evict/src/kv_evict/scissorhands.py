"""Scissorhands: tokens that keep being attended to, and the newest ones."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_evict.running import running_mean
from kv_policy import Evictor, LayerView, Observe


@dataclass(frozen=True)
class Scissorhands(Evictor):
    """Keep the tokens that most queries of the history window attend to more than evenly.

    A token's score is the share of the last `window` queries after it, generated ones included,
    whose attention to it is above an even split over the tokens they see; the newest
    `recent` and the first `sinks` stay. A token too many leaves at every step.

    That the score counts queries above a threshold is how the KV-Compress paper sums the method up
    (its section 2.3). The window of 400 queries, the 10 newest tokens and the even split are from
    memory of the paper, not checked against its text. The paper's budgets per layer need a profile
    of the model and are not done: layers share alike. It drops several tokens at a time; here one a
    step goes, which keeps the budget at every moment.
    """

    name: ClassVar[str] = "scissorhands"
    source: ClassVar[str] = "Scissorhands, Liu et al., 2023, https://arxiv.org/abs/2305.17118"
    decode = "step"  # each generated token takes the place of another once the budget is full

    window: Annotated[int, Meta(ge=1, description="queries of the history that count")] = 400
    recent: Annotated[int, Meta(ge=0, description="newest tokens, always kept")] = 10
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 0

    @property
    def observe(self) -> Observe:
        """How many of the last queries give more than an even share."""
        return Observe(last=self.window, above=1.0, skip=1, generated=True)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Give a token the share of queries that attend to it, and a sink infinity."""
        carried = view.score.masked_fill(view.score.isinf(), 0)
        mean = running_mean(view, carried, self.window)
        return self.protect(mean, view)
