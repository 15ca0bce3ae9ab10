"""Drafted tokens of decoding requests: attended as decoded tokens, stored once they are right.

A cache holds tokens alone that are right. The drafts of a step are vectors beside it, until the
next step tells how many of them are right; `verified` has their attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kv_policy import KVPolicy, complete


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """Vectors of one token per sequence in a layer, or in all of them (N leads).

    Attributes:
        key: as it is stored: projected, if the policy has a basis.
        value: the same.
        own_key: as the model computes it.
        own_value: the same.
    """

    key: Float[Tensor, "*N B H 1 D"]
    value: Float[Tensor, "*N B Hv 1 Dv"]
    own_key: Float[Tensor, "*N B Hk 1 Dk"]
    own_value: Float[Tensor, "*N B Hu 1 Du"]

    @property
    def each(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them."""
        return self.key, self.value, self.own_key, self.own_value

    @classmethod
    def stacked(cls, layers: Sequence["TokenVectors"]) -> "TokenVectors":
        """Return the vectors of all layers, a copy."""
        return cls(*(torch.stack(x) for x in zip(*(layer.each for layer in layers), strict=True)))

    @classmethod
    def joined(cls, sequences: Sequence["TokenVectors"]) -> "TokenVectors":
        """Return the vectors of several sequences in all layers, a copy."""
        parts = zip(*(sequence.each for sequence in sequences), strict=True)
        return cls(*(torch.cat(x, 1) for x in parts))

    def of(self, sequence: int) -> "TokenVectors":
        """Return a copy of the vectors of one sequence in all layers."""
        return TokenVectors(*(x[:, sequence : sequence + 1].clone() for x in self.each))

    def layer(self, layer: int) -> "TokenVectors":
        """Return the vectors of one layer."""
        return TokenVectors(*(x[layer] for x in self.each))


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Drafts of a request that its cache does not hold.

    Attributes:
        first: tokens of the request before the first of them; the cache holds these.
        drafts: each in all layers, of one sequence.
    """

    first: int
    drafts: tuple[TokenVectors, ...] = ()

    def right(self, computed: int) -> tuple[TokenVectors, ...]:
        """Return the drafts that were right.

        Args:
            computed: tokens of the request that are right.

        Raises:
            ValueError: these are fewer than the cache holds, or more than were drafted.
        """
        count = computed - self.first
        if not 0 <= count <= len(self.drafts):
            raise ValueError(
                f"a step continues after {computed} tokens, but the cache holds {self.first} and "
                f"{len(self.drafts)} drafts; please report this with the engine's version"
            )
        return self.drafts[:count]


def unlike_drafts(policy: KVPolicy) -> str | None:
    """Return why drafts under a policy would not be attended as decoded tokens; None: they are.

    Generated tokens must join the others and do nothing else: a step with drafts stores and
    observes none of them before it is known to be right.
    """
    if policy.reading is not None:
        return (
            "it reads pages as their keys rank them, among which would be those of rejected drafts"
        )
    selector = None if policy.selector is None else complete(policy.selector)
    if selector is None:
        return None
    if selector.observe.generated:
        return "it observes the attention of generated queries, and that of a rejected draft too"
    if selector.decode == "step":
        return "each generated token evicts or moves another, which drafts after it must not see"
    if selector.replan.every or selector.replan.uncompressed:
        return "it plans again while tokens are generated, also between drafts of one step"
    return None
