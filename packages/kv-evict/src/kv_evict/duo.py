"""DuoAttention: heads whose outputs need distant tokens keep every token."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Int
from msgspec import Meta
from torch import Tensor

from kv_evict.head_roles import HeadRoles
from kv_evict.heads_file import Kind


@dataclass(frozen=True)
class Duo(HeadRoles):
    """Keep every token in the heads that need distant ones; sinks and newest tokens in the others.

    The `share` of all heads of the model keeps every token whose outputs would change most if they
    saw only both ends of the sequence: the squared error on random tokens that repeat, over the
    squared outputs of the layer. The others keep the first `sinks` and the newest `recent` tokens.

    The paper trains a gate per head, between its full output and that of both ends, so that the
    model's last hidden states change little on hidden passkeys while few gates are open. Here a
    head is judged by the error of its own output, without training.
    """

    name: ClassVar[str] = "duo"
    source: ClassVar[str] = "DuoAttention, Xiao et al., 2024, https://arxiv.org/abs/2410.10819"

    share: Annotated[float, Meta(ge=0, le=1, description="share of heads that keep all")] = 0.5
    sinks: Annotated[int, Meta(ge=0, description="first tokens of a sequence, always kept")] = 128
    recent: Annotated[int, Meta(ge=1, description="newest tokens, always kept")] = 256

    @property
    def shares(self) -> tuple[tuple[Kind, float], ...]:
        """The heads with the largest error."""
        return (("loss", self.share),)

    @property
    def protected(self) -> int:
        """The sinks and the newest tokens."""
        return self.sinks + self.recent

    def newest(self, length: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Return `recent`."""
        return torch.full_like(length, self.recent)
