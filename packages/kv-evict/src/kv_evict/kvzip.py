"""KVzip: tokens that the model needs to repeat its prompt."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final, Literal

import torch
from jaxtyping import Float, UInt8
from msgspec import Meta
from torch import Tensor

from kv_evict.pooling import expect_odd, pool
from kv_evict.schedule import cheapest_pages
from kv_policy import Capabilities, Evictor, LayerView, PlanView, Replay

_FIRST: Final = "\n\nRepeat the previous context exactly."
_LATER: Final = "\n\nRepeat the part of the previous context exactly, starting with "
_QUOTED: Final = 8  # tokens of the previous chunk, in the instruction of a later one
_CERTAIN: Final = 1.0  # the largest probability


@dataclass(frozen=True)
class KVzip(Evictor):
    """Keep the tokens that receive the most attention when the model repeats the prompt.

    After the prompt the model reads it again, in chunks of `chunk` tokens after an instruction to
    repeat it. A token's score is the largest attention probability that it receives, over the
    queries of instruction and chunk and the query heads of its KV head; probabilities are
    normalized over the chunk and its replay (section 3). It is then the maximum over
    `pool` neighbouring positions, 1 in the paper. The lowest scores are evicted, over all heads and
    layers of a sequence, until the budget is met; whole pages, as in KV-Compress. `layers=even`
    gives every layer the same budget.

    Generated tokens grow the cache. A later turn is read again on its own, and stored tokens keep
    their scores. A generated token was not read again: its score is 1, the largest probability, so
    it is evicted after all others.

    In the paper's code the model's chat template ends the instruction and the system prompt is
    always kept; here the instruction is plain text, and `sinks` and `recent` are always kept.
    """

    name: ClassVar[str] = "kvzip"
    source: ClassVar[str] = "KVzip, Kim et al., 2025, https://arxiv.org/abs/2505.23416"

    chunk: Annotated[
        int, Meta(ge=_QUOTED, description="tokens of the prompt that are read again at a time")
    ] = 2048
    pool: Annotated[int, Meta(ge=1, description="neighbouring positions to max-pool over; odd")] = 1
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 4
    recent: Annotated[int, Meta(ge=0, description="newest tokens, always kept")] = 8
    layers: Annotated[
        Literal["free", "even"], Meta(description="free: layer budgets may differ; even: equal")
    ] = "free"

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: an even `pool`, or a budget below the protected tokens.
        """
        super().__post_init__()
        expect_odd(self.name, self.pool)

    @property
    def replay(self) -> Replay:
        """The paper's instructions to repeat the prompt."""
        return Replay(_FIRST, _LATER, quoted=_QUOTED, tokens=self.chunk)

    @property
    def scope(self) -> Literal["layer", "model"]:
        """All layers share one budget, unless `layers=even`."""
        return "model" if self.layers == "free" else "layer"

    @property
    def capabilities(self) -> Capabilities:
        """Heads share a budget even where layers do not, so a shard of them decides differently."""
        return replace(super().capabilities, splits_heads=False)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the largest probability of fresh tokens, and the scores of stored ones."""
        known = view.score
        if view.replayed is not None:
            found = view.replayed
            if self.pool > 1:
                found = pool(found, view.position, view.fresh, self.pool, "max")
            least = torch.finfo(found.dtype).tiny  # a score of 0 marks a token not read again
            known = torch.where(view.fresh, found.clamp(min=least), known)
        return known.masked_fill(known == 0, _CERTAIN)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Evict the cheapest pages, each with a head's lowest scores, until the budget is met."""
        return cheapest_pages(view, sinks=self.sinks, recent=self.recent)
