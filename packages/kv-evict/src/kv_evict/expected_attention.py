"""ExpectedAttention: expected attention of future queries, extrapolated from the prompt's."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView, Queries, Rope


@dataclass(frozen=True)
class ExpectedAttention(Evictor):
    """Keep the tokens with the largest expected attention times the norm of their values.

    The queries of the prompt, except the first `sinks`, are rotated back to position 0; their mean
    and covariance are rotated to the next `future` positions and averaged over these. The logarithm
    of a token's expected attention is mean . key / sqrt(D) + key . covariance . key / (2 D), and a
    softmax over all tokens except the sinks gives probabilities, averaged over the query heads of a
    KV head. That plus `epsilon`, times the norm of the value, is the score. The first `sinks` are
    always kept. Queries are rotated with the rotary embedding of their layer, or not at all in a
    layer without one. A model's attention sinks and bound of logits are not part of the estimate.
    The formulas are those of `expected_attention_press.py` of kvpress, read; generated tokens grow
    the cache.
    """

    name: ClassVar[str] = "expected-attention"
    source: ClassVar[str] = (
        "Expected Attention, Devoto et al., 2025, https://arxiv.org/abs/2510.00636"
    )
    reads = frozenset({"keys", "values", "queries"})

    future: Annotated[int, Meta(ge=1, description="future positions averaged over")] = 512
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 4
    epsilon: Annotated[float, Meta(ge=0, description="added to the expected attention")] = 0.0

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the expected attention of future queries, times the norm of the values."""
        assert view.keys is not None  # they are read
        assert view.values is not None
        assert view.queries is not None
        assert view.rope is not None  # the host refuses models without a known RoPE
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
        """Return mean and covariance of the future queries, per query head."""
        counts = queries.position >= 0
        late = counts & (queries.position >= self.sinks)
        # A pass over the first tokens alone has no other queries.
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
