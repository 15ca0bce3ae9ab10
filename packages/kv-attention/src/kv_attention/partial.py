"""Attention over a part of the tokens, in a form that adds up exactly."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over some set of tokens: the output, and the log of the sum of exp(logits).

    Partials of disjoint sets add up to the partial of their union, in any order and grouping
    (Milakov and Gimelshein 2018; the attention state of FlashInfer). No tokens at all have output 0
    and log-sum-exp -inf, and add nothing.
    """

    out: Float[Tensor, "B H G L Dv"]
    lse: Float[Tensor, "B H G L"]

    def __add__(self, other: "Partial") -> "Partial":
        """Attention over the tokens of both, which must have none in common."""
        lse = torch.logaddexp(self.lse, other.lse)
        finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # no -inf - -inf where both are empty
        mine = (self.lse - finite).exp()[..., None]
        others = (other.lse - finite).exp()[..., None]
        return Partial(self.out * mine + other.out * others, lse)

    def only(self, real: Bool[Tensor, "B L"]) -> "Partial":
        """The same for real queries, and no tokens at all for the others."""
        kept = real[:, None, None, :]
        return Partial(
            torch.where(kept[..., None], self.out, 0), torch.where(kept, self.lse, -torch.inf)
        )

    @classmethod
    def empty(cls, q: Float[Tensor, "B H G L D"], value_dim: int) -> "Partial":
        """Attention of these queries over no tokens, in float32 or in float64 if they are."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros((*q.shape[:-1], value_dim), dtype=dtype, device=q.device)
        return cls(out, out.new_full(q.shape[:-1], -torch.inf))
