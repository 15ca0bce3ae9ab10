"""Integer quantization per vector: each vector (or group in it) has its own scale and zero."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Float32, UInt8
from torch import Tensor

from kv_policy import BitLayout, PlaneLayout
from kv_quant.affine import (
    affine,
    check_size,
    clean,
    error,
    expect_rows,
    expect_vectors,
    pack,
    spread,
    unpack,
)


@dataclass(frozen=True, slots=True)
class IntegerCodec:
    """Asymmetric integers per vector: code = round((x - zero) / scale), as in LeanKV Eq. 2.

    `zero` is the largest float16 not above the least element, and `scale` the smallest float16 with
    which the codes 0 to 2**bits - 1 reach the greatest, so no element is clipped. Codes are
    computed from these rounded numbers, in float32, rounding half to even. A decoded element is
    code * scale + zero with one float32 rounding, fused or not, because the product is exact.

    Edge cases: elements beyond +-32752 (half of the largest float16), including infinities, are
    stored as +-32752, and NaN as 0. A group of equal elements has scale 0 and decodes to their
    nearest float16. -0.0 is stored as 0.0. A vector never affects another vector.

    Source: Zhang et al., 2024, LeanKV (https://arxiv.org/abs/2412.03131), section 2.

    Args:
        dim: D, elements of a vector, 1 or more.
        bits: of one code: 8, 4, 3, 2 or 1.
        group: elements that share a scale and a zero; the last group may be smaller. 0: all.
    """

    dim: int
    bits: int
    group: int = 0
    block = 1  # every token is encoded independently

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_size(self.dim, self.bits)
        if self.group < 0:
            raise ValueError(f"group is {self.group}; use elements per scale, or 0 for all")

    @property
    def planes(self) -> PlaneLayout:
        """Position of each code, scale and zero."""
        return PlaneLayout(self.dim, self.bits, self.group or self.dim)

    @property
    def layout(self) -> BitLayout | PlaneLayout:
        """The same for kernels."""
        return self.planes.plain

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of codes, and of scales and zeros."""
        return self.planes.parts

    def encode(self, x: Float[Tensor, "n 1 D"]) -> UInt8[Tensor, "n N"]:
        """Encode vectors into codes, scales and zeros in this layout.

        Raises:
            ValueError: the vectors do not have `dim` elements.
        """
        expect_vectors(x, self.dim)
        inner = clean(x[:, 0])
        scale, zero = self._affine(inner)
        divisor = scale.float().masked_fill(scale == 0, torch.inf)  # a flat group gets codes 0
        codes = (inner - self._spread(zero.float())).div_(self._spread(divisor)).round_()
        packed = pack(codes.to(torch.uint8), self.planes)
        return torch.cat([packed, scale.view(torch.uint8), zero.view(torch.uint8)], dim=1)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float32[Tensor, "n 1 D"]:
        """Decode bytes into float32 vectors: code * scale + zero.

        Raises:
            ValueError: the rows do not have `sum(parts)` bytes.
        """
        planes = self.planes
        stride = planes.stride
        expect_rows(data, sum(planes.parts))
        meta = data[:, stride:].clone(memory_format=torch.contiguous_format)  # aligned to float16
        scale, zero = meta.view(torch.float16).float().chunk(2, dim=1)
        codes = unpack(data[:, :stride], planes)
        return codes.mul_(self._spread(scale)).add_(self._spread(zero))[:, None]

    def bound(self, x: Float[Tensor, "n 1 D"]) -> Float[Tensor, "n 1 D"]:
        """Return half a scale plus the float32 error, 2**-21 of the largest decoded code.

        A scale is at most (span + one float16 step of the least element) / (2**bits - 1), rounded
        up to a float16. The error of a flat group is the rounding of its value to float16. Elements
        beyond +-32752 add the clipped amount, which is infinite for an infinity or a NaN.
        """
        scale, zero = (self._spread(part.double()) for part in self._affine(clean(x[:, 0])))
        return error(x[:, 0], scale, zero, self.bits)[:, None]

    def _affine(
        self, x: Float32[Tensor, "n D"]
    ) -> tuple[Float16[Tensor, "n groups"], Float16[Tensor, "n groups"]]:
        planes = self.planes
        short = planes.groups * planes.group - self.dim
        if planes.groups == 1:
            grouped = x[:, None]
        else:  # padding with an element of the last group keeps its least and greatest
            filled = torch.cat([x, x[:, -1:].expand(-1, short)], dim=1) if short else x
            grouped = filled.view(-1, planes.groups, planes.group)
        return affine(grouped.amin(dim=-1), grouped.amax(dim=-1), self.bits)

    def _spread(self, per_group: Tensor) -> Tensor:
        """Expand the numbers of each group to its elements."""
        return spread(per_group, self.group, self.dim)
