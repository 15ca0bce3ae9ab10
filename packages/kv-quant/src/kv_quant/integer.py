"""Vectors as small integers, each vector (or group in it) with a scale and a zero of its own."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Float32, UInt8
from torch import Tensor

from kv_policy import BitLayout
from kv_quant.affine import affine, check_size, clean, error, pack, unpack


@dataclass(frozen=True, slots=True)
class IntegerCodec:
    """Asymmetric integers per vector: code = round((x - zero) / scale), as LeanKV Eq. 2 has it.

    `zero` is the largest float16 that is not above the least element, and `scale` the smallest
    float16 with which the codes 0 to 2**bits - 1 reach the greatest, so no element is cut off.
    Codes are computed against these rounded numbers, in float32, halves to even. A decoded element
    is code * scale + zero with one float32 rounding, fused or not, because the product is exact.

    Defined results at the edges: elements beyond +-32752 (half of the largest float16), infinities
    among them, are stored as +-32752, and a NaN as 0. A group of equal elements has scale
    0 and decodes to their nearest float16. -0.0 is stored as 0.0. What one vector holds never
    changes another vector.

    Source: Zhang et al., 2024, LeanKV (https://arxiv.org/abs/2412.03131), section 2.

    Args:
        dim: D, elements of a vector, 1 or more.
        bits: of one code: 8, 4, 2 or 1.
        group: elements that share a scale and a zero; the last group may have fewer. 0: all.
    """

    dim: int
    bits: int
    group: int = 0
    block = 1  # every token is encoded alone

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_size(self.dim, self.bits)
        if self.group < 0:
            raise ValueError(f"group is {self.group}; give elements per scale, or 0 for all")

    @property
    def layout(self) -> BitLayout:
        """Where each code, scale and zero lies."""
        return BitLayout(self.dim, self.bits, self.group or self.dim)

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of codes, and of scales with zeros."""
        return self.layout.parts

    def encode(self, x: Float[Tensor, "n 1 D"]) -> UInt8[Tensor, "n N"]:
        """Turn vectors into codes, scales and zeros, as `layout` says.

        Raises:
            ValueError: the vectors do not have `dim` elements.
        """
        if x.shape[1:] != (1, self.dim):
            raise ValueError(
                f"vectors have shape {tuple(x.shape)}; this codec takes n, 1, {self.dim}"
            )
        inner = clean(x[:, 0])
        scale, zero = self._affine(inner)
        divisor = scale.float().masked_fill(scale == 0, torch.inf)  # a flat group gets codes 0
        codes = (inner - self._spread(zero.float())).div_(self._spread(divisor)).round_()
        packed = pack(codes.to(torch.uint8), self.layout)
        return torch.cat([packed, scale.view(torch.uint8), zero.view(torch.uint8)], dim=1)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float32[Tensor, "n 1 D"]:
        """Turn bytes back into float32 vectors: code * scale + zero.

        Raises:
            ValueError: the rows do not have `sum(parts)` bytes.
        """
        layout = self.layout
        stride, size = layout.stride, sum(layout.parts)
        if data.shape[1] != size:
            raise ValueError(f"a row has {data.shape[1]} bytes; this codec stores {size} a vector")
        meta = data[:, stride:].clone(memory_format=torch.contiguous_format)  # aligned to float16
        scale, zero = meta.view(torch.float16).float().chunk(2, dim=1)
        codes = unpack(data[:, :stride], layout)
        return codes.mul_(self._spread(scale)).add_(self._spread(zero))[:, None]

    def bound(self, x: Float[Tensor, "n 1 D"]) -> Float[Tensor, "n 1 D"]:
        """Half a scale, and what float32 arithmetic adds: 2**-21 of the largest code's value.

        A scale is at most (span + one float16 step of the least element) / (2**bits - 1), rounded
        up to a float16. A flat group is off by the rounding of its one value to float16. Elements
        beyond +-32752 are off by what is cut off them too, an infinity or a NaN by infinity.
        """
        scale, zero = (self._spread(part.double()) for part in self._affine(clean(x[:, 0])))
        return error(x[:, 0], scale, zero, self.bits)[:, None]

    def _affine(
        self, x: Float32[Tensor, "n D"]
    ) -> tuple[Float16[Tensor, "n groups"], Float16[Tensor, "n groups"]]:
        layout = self.layout
        short = layout.groups * layout.group - self.dim
        if layout.groups == 1:
            grouped = x[:, None]
        else:  # an element of the last group, repeated, changes neither its least nor its greatest
            filled = torch.cat([x, x[:, -1:].expand(-1, short)], dim=1) if short else x
            grouped = filled.view(-1, layout.groups, layout.group)
        return affine(grouped.amin(dim=-1), grouped.amax(dim=-1), self.bits)

    def _spread(self, per_group: Tensor) -> Tensor:
        """Give each element its group's number."""
        if per_group.shape[1] == 1:
            return per_group
        return per_group.repeat_interleave(self.group, dim=1)[:, : self.dim]
