"""ExpectedAttention: what queries to come would look at, if they were like those of the prompt."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView, Queries, Rope


@dataclass(frozen=True)
class ExpectedAttention(Evictor):
    """Keep the tokens of the largest expected attention times the norm of their values.

    The queries of the prompt, but for the first `sinks`, are turned back to position 0; their mean
    and covariance are turned to the next `future` positions, on average over these. The logarithm
    of a token's expected attention is mean . key / sqrt(D) + key . covariance . key / (2 D), and a
    softmax over the tokens but the sinks makes probabilities, averaged over the query heads of a KV
    head. That plus `epsilon`, times the norm of the value, is the score. The first `sinks` stay.
    Each layer's queries are turned as its own rotary embedding does, or not at all where it has
    none.
    The formulas are those of `expected_attention_press.py` of kvpress, read; generated tokens join
    the cache.
    """

    name: ClassVar[str] = "expected-attention"
    source: ClassVar[str] = (
        "Expected Attention, Devoto et al., 2025, https://arxiv.org/abs/2510.00636"
    )
    reads = frozenset({"keys", "values", "queries"})

    future: Annotated[int, Meta(ge=1, description="next positions that queries are from")] = 512
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 4
    epsilon: Annotated[float, Meta(ge=0, description="added to the expected attention")] = 0.0

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Expect what the queries to come would pay each token."""
        assert view.keys is not None  # they are read
        assert view.values is not None
        assert view.queries is not None
        assert view.rope is not None  # the host refuses models where it is unknown
        mean, covariance = self._future(view.queries, view.length, view.rope)
        keys, dim = view.keys, view.keys.shape[-1]
        logit = torch.einsum("bhgd,bhld->bhgl", mean, keys) / dim**0.5
        logit += torch.einsum("bhld,bhgde,bhle->bhgl", keys, covariance, keys) / (2 * dim)
        competes = (view.position >= self.sinks)[:, :, None]
        weight = logit.masked_fill(~competes, -torch.inf).softmax(-1).nan_to_num(0).mean(2)
        score = (weight + self.epsilon) * torch.linalg.vector_norm(view.values, dim=-1)
        return self.protect(score, view)

    def _future(
        self, queries: Queries, length: Tensor, rope: Rope
    ) -> tuple[Float[Tensor, "B H G D"], Float[Tensor, "B H G D D"]]:
        """Mean and covariance of the queries to come, per query head."""
        counts = queries.position >= 0
        late = counts & (queries.position >= self.sinks)
        # A pass over the first tokens alone has no others to go by.
        counts = torch.where(late.any(-1, keepdim=True), late, counts)
        back = -queries.position.clamp(min=0)[:, None, None]
        plain = rope.turned(queries.vectors.float(), back)
        weight = counts[:, None, None, :, None].float()
        number = weight.sum(3).clamp(min=1)
        mean = (plain * weight).sum(3) / number
        apart = (plain - mean[..., None, :]) * weight
        covariance = apart.mT @ apart / number[..., None]
        to_come = length[:, None] + torch.arange(self.future, device=length.device)
        matrix = rope.mean_turn(to_come, plain.shape[-1])[:, None, None]
        mean = (matrix @ mean[..., None])[..., 0]
        return mean, matrix @ covariance @ matrix.mT
