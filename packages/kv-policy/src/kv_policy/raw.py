"""The codec that stores vectors unquantized, and the policy that keeps every token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kv_policy.codec import TokenFormat
from kv_policy.contract import Formats
from kv_policy.part import Part
from kv_policy.shape import CacheShape


@dataclass(frozen=True, slots=True)
class RawCodec:
    """Stores a vector in a floating-point dtype; exact for vectors of that dtype."""

    dim: int
    dtype: torch.dtype
    block = 1  # every token is encoded separately
    layout = None  # no integer codes

    @property
    def parts(self) -> tuple[int]:
        """Bytes of the vector."""
        return (self.dim * self.dtype.itemsize,)

    def encode(self, x: Float[Tensor, "n 1 D"]) -> UInt8[Tensor, "n N"]:
        """Cast to the stored dtype and return the bytes."""
        return x[:, 0].to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float[Tensor, "n 1 D"]:
        """Read the bytes as vectors of the stored dtype."""
        size = self.dtype.itemsize
        if data.storage_offset() % size or data.stride(0) % size or data.stride(1) != 1:
            data = data.clone(memory_format=torch.contiguous_format)  # views must be aligned
        return data.view(self.dtype)[:, None]

    def bound(self, x: Float[Tensor, "n 1 D"]) -> Float[Tensor, "n 1 D"]:
        """Return half a unit in the last place of the stored dtype; infinity past its range."""
        info = torch.finfo(self.dtype)
        size = x.abs().to(torch.float64)
        return torch.where(size > info.max, torch.inf, size * info.eps / 2 + info.tiny)


@dataclass(frozen=True)
class Uncompressed(Part):
    """Base of formats that store keys and values as floating-point numbers."""

    dtype: ClassVar[torch.dtype | None] = None  # None: the model's own
    variants: ClassVar[tuple[str, ...]] = ()  # not searched: it saves nothing by itself
    tiers = 1
    window = 0  # tokens are raw already

    @property
    def formats(self) -> Formats:
        """This format."""
        return self

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        """Return one format with the shape's own dimensions."""
        dtype = self.dtype or shape.dtype
        return (TokenFormat(RawCodec(shape.key_dim, dtype), RawCodec(shape.value_dim, dtype)),)


@dataclass(frozen=True)
class Raw(Uncompressed):
    """Keep every token unquantized: the identity."""

    name: ClassVar[str] = "raw"
    source: ClassVar[str] = "no compression, in pages"
