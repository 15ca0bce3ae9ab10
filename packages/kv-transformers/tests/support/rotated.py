"""A basis for any model."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kv_policy import CacheShape, HeadBasis, LayerBasis, Part


@dataclass(frozen=True)
class Wide(Part):
    """A rotation of full rank and any dimension."""

    name: ClassVar[str] = "wide"

    @property
    def basis(self) -> "Wide":
        return self

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        g = torch.Generator().manual_seed(layer)

        def turned(dim: int) -> HeadBasis:
            whole = torch.randn(shape.kv_heads, dim, dim, generator=g, dtype=torch.float64)
            return HeadBasis(torch.linalg.qr(whole).Q, (dim,) * shape.kv_heads)

        return LayerBasis(turned(shape.key_dim), turned(shape.value_dim))
