"""The arguments of an attention pass, checked by `attend` and passed to backends."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention.tokens import DenseTokens
from kv_policy import Observe, PagedTokens


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Queries, the tokens they attend to, and the observations of the pass.

    Attributes:
        q: queries.
        position: positions of the queries, -1 for padding.
        pages: stored tokens, one entry per tier.
        dense: plain tokens.
        page_positions: positions of the stored tokens by slot, one entry per tier.
        value_dim: Dv.
        scale: the factor of the logits.
        observations: the attention masses to sum; the first belongs to the output, the others
            become its `others`.
        softcap: the bound c of the logits x, which become c * tanh(x / c); None: no bound.
        sinks: a logit of each query head that takes part in the softmax and has no value; None:
            there are none. Padding queries have none.
        chosen: which tokens each query attends to, by position, of those that it sees; None: all.
            Given to the backends that `attend` names only.
        out: memory for the output, which a backend may return as the output; None: it allocates.
    """

    q: Float[Tensor, "B H G L D"]
    position: Int[Tensor, "B L"]
    pages: Sequence[PagedTokens]
    dense: Sequence[DenseTokens]
    page_positions: Sequence[Int[Tensor, "B H _"] | None]
    value_dim: int
    scale: float
    observations: tuple[Observe, ...] = (Observe(0),)
    softcap: float | None = None
    sinks: Float[Tensor, "H G"] | None = None
    chosen: Bool[Tensor, "B L P"] | None = None
    out: Float[Tensor, "B H G L Dv"] | None = None

    @property
    def observed(self) -> bool:
        """Whether any observation sums anything."""
        return any(what.last != 0 for what in self.observations)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of logits and sums: float32, or float64 for queries in float64."""
        return torch.promote_types(self.q.dtype, torch.float32)
