"""Keyformer: accumulated Gumbel-softmax attention, and the newest tokens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView, Observe, RunningSum


@dataclass(frozen=True)
class Keyformer(Evictor):
    """Keep the tokens with the largest Gumbel-softmax attention so far, and the newest ones.

    A token's score is the softmax of logits with Gumbel noise over the temperature `tau`, its own
    query included, summed over all queries and averaged over the query heads of its KV head. The
    newest `recent` of the budget are kept. Once the budget is full, each generated token evicts the
    token with the lowest score (`modeling_gptj.py` of the authors' repository, read).

    The authors raise the temperature from 1 by 0.01 with every generated token; here it is
    constant. The noise of a query and a token is a hash of their positions, the same in all heads
    and layers, so that runs are reproducible.
    """

    name: ClassVar[str] = "keyformer"
    source: ClassVar[str] = "Keyformer, Adnan et al., 2024, https://arxiv.org/abs/2403.09054"
    decode = "step"  # each generated token evicts another once the budget is full
    running = RunningSum()  # the sum that `score` updates

    tau: Annotated[float, Meta(gt=0, description="temperature of the noisy softmax")] = 1.0
    recent: Annotated[
        float, Meta(ge=0, le=1, description="share of the budget for the newest tokens")
    ] = 0.3

    @property
    def observe(self) -> Observe:
        """Every query, of the prompt and generated, with noise."""
        return Observe(last=None, generated=True, gumbel=self.tau)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Accumulate the attention a token receives."""
        assert view.mass is not None  # it is observed
        return view.score + view.mass
