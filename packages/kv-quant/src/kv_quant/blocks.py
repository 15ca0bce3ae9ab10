"""Block codecs: keys with a scale and a zero per channel, and per-token values in blocks."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Float32, UInt8
from torch import Tensor

from kv_policy import BitLayout, PlaneLayout
from kv_quant.affine import affine, check_size, clean, error, pack, unpack
from kv_quant.integer import IntegerCodec


@dataclass(frozen=True, slots=True)
class ChannelCodec:
    """Asymmetric integers per channel: element d of all vectors of a block share scale and zero.

    A few key channels are large in every token. A scale per token spends most of its codes on
    them; a scale per channel does not. Scales, zeros, rounding and edge cases are those of
    `IntegerCodec`, with a channel of the block in place of a vector. A block holds the codes of its
    tokens row after row, then D scales, then D zeros.

    Source: Liu et al., 2024, KIVI (https://arxiv.org/abs/2402.02750), section 3.

    Args:
        dim: D, elements of a vector, 1 or more.
        bits: of one code: 8, 4, 3, 2 or 1.
        block: S, tokens encoded together, 1 or more.
    """

    dim: int
    bits: int
    block: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_size(self.dim, self.bits)
        _check_block(self.block)

    @property
    def planes(self) -> PlaneLayout:
        """Position of each code, scale and zero."""
        return PlaneLayout(self.dim, self.bits, 1, tokens=self.block)

    @property
    def layout(self) -> BitLayout | PlaneLayout:
        """The same for kernels."""
        return self.planes.plain

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of a block's codes, and of its scales and zeros."""
        return self.planes.parts

    def encode(self, x: Float[Tensor, "n S D"]) -> UInt8[Tensor, "n N"]:
        """Encode blocks into codes, scales and zeros in this layout.

        Raises:
            ValueError: the blocks do not have `block` vectors of `dim` elements.
        """
        _check_shape(x, self.block, self.dim)
        inner = clean(x)
        scale, zero = self._affine(inner)
        divisor = scale.float().masked_fill(scale == 0, torch.inf)  # a flat channel gets codes 0
        codes = inner.sub_(zero.float()[:, None]).div_(divisor[:, None]).round_()
        packed = pack(codes.to(torch.uint8).flatten(0, 1), self.planes).view(len(x), self.parts[0])
        return torch.cat([packed, scale.view(torch.uint8), zero.view(torch.uint8)], dim=1)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float32[Tensor, "n S D"]:
        """Decode bytes into float32 vectors: code * scale + zero.

        Raises:
            ValueError: the rows do not have `sum(parts)` bytes.
        """
        _check_bytes(data, sum(self.parts))
        split = self.parts[0]
        meta = data[:, split:].clone(memory_format=torch.contiguous_format)  # aligned to float16
        scale, zero = meta.view(torch.float16).float()[:, None].chunk(2, dim=2)
        planes = self.planes
        rows = data[:, :split].reshape(len(data) * self.block, planes.stride)
        codes = unpack(rows, planes).view(len(data), self.block, self.dim)
        return codes.mul_(scale).add_(zero)

    def bound(self, x: Float[Tensor, "n S D"]) -> Float[Tensor, "n S D"]:
        """Return half the channel's scale plus 2**-21 of its largest decoded code."""
        scale, zero = (part.double()[:, None] for part in self._affine(clean(x)))
        return error(x, scale, zero, self.bits)

    def _affine(
        self, x: Float32[Tensor, "n S D"]
    ) -> tuple[Float16[Tensor, "n D"], Float16[Tensor, "n D"]]:
        return affine(x.amin(dim=1), x.amax(dim=1), self.bits)


@dataclass(frozen=True, slots=True)
class RowsCodec:
    """Blocks of independently encoded tokens: the codes of all, then their scales and zeros.

    It stores values per token in a tier whose keys are encoded in blocks; the bytes of a token are
    those of `each`.

    Args:
        each: codec of a single vector.
        block: S, tokens per block, 1 or more.
    """

    each: IntegerCodec
    block: int

    def __post_init__(self) -> None:
        """Check the size."""
        _check_block(self.block)

    @property
    def dim(self) -> int:
        """D, elements of a vector."""
        return self.each.dim

    @property
    def planes(self) -> PlaneLayout:
        """Position of each code, scale and zero of a vector."""
        return self.each.planes

    @property
    def layout(self) -> BitLayout | PlaneLayout:
        """The same for kernels."""
        return self.each.layout

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of a block's codes, and of all its scales and zeros."""
        codes, meta = self.each.parts
        return self.block * codes, self.block * meta

    def encode(self, x: Float[Tensor, "n S D"]) -> UInt8[Tensor, "n N"]:
        """Encode vectors into codes, scales and zeros.

        Raises:
            ValueError: the blocks do not have `block` vectors of `dim` elements.
        """
        _check_shape(x, self.block, self.dim)
        rows = self.each.encode(x.reshape(-1, 1, self.dim))
        split = rows.split(self.each.parts, dim=1)
        sizes = zip(split, self.parts, strict=True)
        return torch.cat([part.reshape(len(x), size) for part, size in sizes], dim=1)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float32[Tensor, "n S D"]:
        """Decode bytes into float32 vectors.

        Raises:
            ValueError: the rows do not have `sum(parts)` bytes.
        """
        _check_bytes(data, sum(self.parts))
        sizes = zip(data.split(self.parts, dim=1), self.each.parts, strict=True)
        rows = [part.reshape(len(data) * self.block, size) for part, size in sizes]
        return self.each.decode(torch.cat(rows, dim=1)).view(-1, self.block, self.dim)

    def bound(self, x: Float[Tensor, "n S D"]) -> Float[Tensor, "n S D"]:
        """Return the bound of `each` for every vector."""
        return self.each.bound(x.reshape(-1, 1, self.dim)).view(x.shape)


def _check_block(block: int) -> None:
    if block < 1:
        raise ValueError(f"block is {block}; use at least 1 token per block")


def _check_shape(x: Tensor, block: int, dim: int) -> None:
    if x.shape[1:] != (block, dim):
        raise ValueError(f"vectors have shape {tuple(x.shape)}; expected n, {block}, {dim}")


def _check_bytes(data: Tensor, size: int) -> None:
    if data.shape[1] != size:
        raise ValueError(f"a row has {data.shape[1]} bytes; this codec stores {size} per block")
