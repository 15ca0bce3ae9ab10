"""Attention over a part of the tokens, in a form that merges exactly."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a set of tokens: the output, and the log-sum-exp of the logits.

    Partials of disjoint sets merge to the partial of their union, in any order and grouping
    (Milakov and Gimelshein 2018; the attention state of FlashInfer). The partial of no tokens has
    output 0 and log-sum-exp -inf, and is neutral.
    """

    out: Float[Tensor, "B H G L Dv"]
    lse: Float[Tensor, "B H G L"]

    def __add__(self, other: "Partial") -> "Partial":
        """Merge with the attention over a disjoint set of tokens."""
        lse = torch.logaddexp(self.lse, other.lse)
        finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # avoid -inf - -inf if both are empty
        mine = (self.lse - finite).exp()[..., None]
        others = (other.lse - finite).exp()[..., None]
        return Partial(self.out * mine + other.out * others, lse)

    def with_sinks(self, sinks: Float[Tensor, "H G"]) -> "Partial":
        """Merge with a logit of each query head that has no value: output 0 and this log-sum-exp.

        Once for the union of all tokens: merging is addition, and would count them again.
        """
        lse = torch.logaddexp(self.lse, sinks[..., None].to(self.lse.dtype))
        finite = lse.clamp(min=torch.finfo(lse.dtype).min)
        return Partial(self.out * (self.lse - finite).exp()[..., None], lse)

    def only(self, real: Bool[Tensor, "B L"]) -> "Partial":
        """Return the partial with padding queries replaced by the partial of no tokens."""
        kept = real[:, None, None, :]
        return Partial(
            torch.where(kept[..., None], self.out, 0), torch.where(kept, self.lse, -torch.inf)
        )

    @classmethod
    def empty(cls, q: Float[Tensor, "B H G L D"], value_dim: int) -> "Partial":
        """Return the partial of no tokens, in float32, or float64 for queries in float64."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros((*q.shape[:-1], value_dim), dtype=dtype, device=q.device)
        return cls(out, out.new_full(q.shape[:-1], -torch.inf))


@dataclass(frozen=True, slots=True)
class Scored:
    """Attention over a set of tokens, and the largest probability that some of them receive.

    Attributes:
        partial: the attention.
        largest: per scored part of the tokens, the largest probability over all queries of a KV
            head, normalized over the whole set; 0 for an empty slot. In the dtype of `partial.lse`.
    """

    partial: Partial
    largest: tuple[Float[Tensor, "B H _"], ...] = ()
