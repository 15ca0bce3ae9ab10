"""A block of stored vectors, and the two matrix products of attention with it."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from kv_policy import BitLayout, Codec


@dataclass(frozen=True, slots=True)
class Vectors:
    """S vectors of each of R table rows: plain, or as integer codes with a scale and a zero point.

    The vector is code * scale + zero. A scale or zero point per vector is applied outside the
    products, without dequantizing the codes.
    """

    rows: Float[Tensor, "R S D"]
    scale: Float[Tensor, "R S"] | None = None
    zero: Float[Tensor, "R S"] | None = None

    def dot(self, q: Float[Tensor, "R Q D"]) -> Float[Tensor, "R Q S"]:
        """Return the dot products of each query with each vector."""
        products = q @ self.rows.mT
        if self.scale is None or self.zero is None:
            return products
        shift = q.sum(dim=-1, keepdim=True) * self.zero[:, None]
        return products.mul_(self.scale[:, None]).add_(shift)

    def weigh(self, p: Float[Tensor, "R Q S"]) -> Float[Tensor, "R Q D"]:
        """Return the sums of the vectors with each query's weights."""
        if self.scale is None or self.zero is None:
            return p @ self.rows
        return (p * self.scale[:, None]) @ self.rows + p @ self.zero[..., None]

    def plain(self) -> "Vectors":
        """Return the dequantized vectors; faster if there are more queries than dimensions."""
        if self.scale is None or self.zero is None:
            return self
        return Vectors((self.rows * self.scale[..., None]).add_(self.zero[..., None]))

    def head(self, count: int) -> "Vectors":
        """Return the first vectors of each table row."""
        if self.scale is None or self.zero is None:
            return Vectors(self.rows[:, :count])
        return Vectors(self.rows[:, :count], self.scale[:, :count], self.zero[:, :count])

    def first(self, dims: int) -> "Vectors":
        """Return the first dimensions of the vectors."""
        return Vectors(self.rows[..., :dims], self.scale, self.zero)

    def only(self, held: Bool[Tensor, "R S"]) -> "Vectors":
        """Return the vectors with zeros in empty slots, whatever bytes these contain."""
        if self.scale is None or self.zero is None:
            # A bit mask takes half the time of masked_fill, and multiplying by 0 would keep a NaN.
            bits = torch.int64 if self.rows.dtype == torch.float64 else torch.int32
            kept = self.rows.view(bits) & -held.to(bits)[..., None]
            return Vectors(kept.view(self.rows.dtype))
        return Vectors(self.rows, self.scale.masked_fill(~held, 0), self.zero.masked_fill(~held, 0))


def read(
    parts: list[UInt8[Tensor, "n _"]], codec: Codec, table_rows: int, dtype: torch.dtype
) -> Vectors:
    """Read the encoded blocks of the same number of pages of each table row.

    Args:
        parts: per part of the codec the bytes of n = rows * pages pages, in contiguous tensors.
        codec: the codec of the blocks.
        table_rows: R; the pages are ordered by table row.
        dtype: the compute dtype.
    """
    layout = codec.layout
    if isinstance(layout, BitLayout) and layout.tokens == 1 and len(parts) == 2:
        return _codes(parts[0], parts[1], layout, table_rows, dtype)
    blocks = parts[0].numel() // codec.parts[0]
    split = [part.view(blocks, size) for part, size in zip(parts, codec.parts, strict=True)]
    data = split[0] if len(split) == 1 else torch.cat(split, dim=-1)
    return Vectors(codec.decode(data).to(dtype).reshape(table_rows, -1, codec.dim))


def _codes(
    codes: UInt8[Tensor, "n _"],
    meta: UInt8[Tensor, "n _"],
    layout: BitLayout,
    table_rows: int,
    dtype: torch.dtype,
) -> Vectors:
    packed = codes.view(table_rows, -1, layout.stride)
    if layout.bits < 8:  # bit plane i of the dimensions is at bit i * bits of every byte
        mask = (1 << layout.bits) - 1
        planes = [(packed >> shift) & mask for shift in range(0, 8, layout.bits)]
        packed = torch.cat(planes, dim=-1)
    rows = packed.to(dtype)[..., : layout.dim]
    numbers = meta.view(torch.float16).view(table_rows, -1, 2, layout.groups).to(dtype)
    scale, zero = numbers.unbind(dim=2)
    if layout.groups == 1:
        return Vectors(rows, scale[..., 0], zero[..., 0])
    spread = [x.repeat_interleave(layout.group, dim=-1)[..., : layout.dim] for x in (scale, zero)]
    return Vectors(rows.mul_(spread[0]).add_(spread[1]))
