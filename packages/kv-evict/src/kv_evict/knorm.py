"""Knorm: keys with a small norm."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kv_evict.rounding import rounded
from kv_policy import Evictor, LayerView


@dataclass(frozen=True)
class Knorm(Evictor):
    """Keep the keys with the smallest L2 norm, which attract attention, at every step.

    Nothing is observed and no token is protected (`knorm_press.py` of kvpress, read). Generated
    tokens are scored like the others, when they arrive.

    A rotary embedding preserves the norm, so a repeated token has an equal norm up to rounding.
    Norms are compared to 12 bits, and the earlier of equal tokens is kept.
    """

    name: ClassVar[str] = "knorm"
    source: ClassVar[str] = "Devoto et al., 2024, https://arxiv.org/abs/2406.11430"
    reads = frozenset({"keys"})
    decode = "step"  # each generated token evicts another once the budget is full
    decodes_on_device = True

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return minus the norm of the key."""
        assert view.keys is not None  # they are read
        return -rounded(torch.linalg.vector_norm(view.keys, dim=-1))
