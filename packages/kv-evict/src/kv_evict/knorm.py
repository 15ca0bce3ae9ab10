"""Knorm: keys of small norm."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kv_evict.rounding import rounded
from kv_policy import Evictor, LayerView


@dataclass(frozen=True)
class Knorm(Evictor):
    """Keep the keys of the smallest L2 norm, which attract attention, at every moment.

    Nothing is observed and nothing protected (`knorm_press.py` of kvpress, read). Generated
    tokens are judged like the others, each when it arrives.

    A rotary embedding changes no norm, so a repeated token has an equal norm, but
    for rounding. Norms are compared to 12 bits, and of equal ones the earlier token stays.
    """

    name: ClassVar[str] = "knorm"
    source: ClassVar[str] = "Devoto et al., 2024, https://arxiv.org/abs/2406.11430"
    reads = frozenset({"keys"})
    decode = "step"  # each generated token takes the place of another once the budget is full

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Give a key its norm, the smallest first."""
        assert view.keys is not None  # they are read
        return -rounded(torch.linalg.vector_norm(view.keys, dim=-1))
