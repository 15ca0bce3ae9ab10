"""A codec that encodes several tokens together."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Halves:
    """Two vectors together, in float16, the second first."""

    dim: int
    block: int = 2
    layout: None = None

    @property
    def parts(self) -> tuple[int]:
        return (4 * self.dim,)

    def encode(self, x: Tensor) -> Tensor:
        return x.half().flip(1).contiguous().flatten(1).view(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.float16).view(-1, 2, self.dim).flip(1)

    def bound(self, x: Tensor) -> Tensor:
        return x.abs() / 1024
