"""Codebooks for rotated coordinates: levels of a normal distribution, times the vector's norm."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Float, Float16, Float32, UInt8
from torch import Tensor

from kv_policy import PlaneLayout
from kv_quant.affine import clean, expect_rows, expect_vectors, pack, unpack

# Positive levels of the quantizers of a standard normal number with the least mean squared error
# (Lloyd, 1982; Max, 1960): each is the mean of the numbers that are nearest to it.
_POSITIVE: Final[Mapping[int, tuple[float, ...]]] = {
    1: (0.7978846,),
    2: (0.45278, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
LEVELS: Final[Mapping[int, tuple[float, ...]]] = {
    bits: (*(-x for x in reversed(half)), *half) for bits, half in _POSITIVE.items()
}


@dataclass(frozen=True, slots=True)
class CodebookCodec:
    """Vectors as codes of fixed levels, times the root mean square of their elements.

    After a rotation that spreads a vector over all coordinates, these are nearly independent normal
    numbers, whose variance is the squared norm of the vector over D. The codebook has the levels of
    least mean squared error for them. The scale is the root mean square of the elements as a
    float16, which is the norm over sqrt(D), so norms are kept as in TurboQuant. An element is
    divided by it in float32, and of two equally near levels the lower is taken. A decoded element
    is level * scale in float32. Vectors that are not rotated are stored as well, but less closely.

    Elements beyond +-32752 are stored as such, NaN as 0, as in `IntegerCodec`. A vector whose scale
    is 0 as a float16 decodes to zeros.

    Source: Zandieh et al., 2025, TurboQuant (https://arxiv.org/abs/2504.19874), whose levels are
    of the exact distribution for each D; its second stage for inner products is left out.

    Args:
        dim: D, elements of a vector, 1 or more.
        bits: of one code: 4, 3, 2 or 1.
    """

    dim: int
    bits: int
    block = 1  # every token is encoded independently

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: `dim` or `bits` is not supported.
        """
        if self.bits not in LEVELS:
            raise ValueError(f"bits is {self.bits}; a codebook has codes of 4, 3, 2 or 1 bits")
        if self.dim < 1:
            raise ValueError(f"dim is {self.dim}; a vector has at least 1 element")

    @property
    def planes(self) -> PlaneLayout:
        """Position of each code, and what it stands for."""
        return _planes(self.dim, self.bits)

    @property
    def layout(self) -> PlaneLayout:
        """The same for kernels."""
        return self.planes

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of codes, and of the scale."""
        return self.planes.parts

    def encode(self, x: Float[Tensor, "n 1 D"]) -> UInt8[Tensor, "n N"]:
        """Encode vectors into codes and a scale.

        Raises:
            ValueError: the vectors do not have `dim` elements.
        """
        expect_vectors(x, self.dim)
        inner = clean(x[:, 0])
        scale = _scale(inner)
        divisor = scale.float().masked_fill(scale == 0, torch.inf)
        _, bounds = _tables(self.bits, x.device)
        codes = torch.bucketize((inner / divisor).contiguous(), bounds, out_int32=True)
        packed = pack(codes.to(torch.uint8), self.planes)
        return torch.cat([packed, scale.view(torch.uint8)], dim=1)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float32[Tensor, "n 1 D"]:
        """Decode bytes into float32 vectors: level * scale.

        Raises:
            ValueError: the rows do not have `sum(parts)` bytes.
        """
        stride = self.planes.stride
        expect_rows(data, sum(self.parts))
        meta = data[:, stride:].clone(memory_format=torch.contiguous_format)  # aligned to float16
        levels, _ = _tables(self.bits, data.device)
        codes = unpack(data[:, :stride], self.planes).int()
        return (levels[codes] * meta.view(torch.float16).float())[:, None]

    def bound(self, x: Float[Tensor, "n 1 D"]) -> Float[Tensor, "n 1 D"]:
        """Return half the widest step, or the distance to the outermost level beyond it.

        2**-20 of the element and the outermost level are added for float32 arithmetic, and what is
        clipped, which is infinite for an infinity or a NaN.
        """
        given = x[:, 0]
        inner = clean(given)
        scale, size = _scale(inner).double(), inner.double().abs()
        levels = LEVELS[self.bits]
        step, top = max(b - a for a, b in pairwise(levels)) / 2, levels[-1]
        inside = torch.maximum(step * scale, size - top * scale) + 2**-20 * (size + top * scale)
        clipped = (given.double() - inner).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        return (inside + clipped)[:, None]


def _scale(x: Float32[Tensor, "n D"]) -> Float16[Tensor, "n 1"]:
    """Return the root mean squares; in float64, so that the order of a sum does not matter."""
    return x.double().square().mean(-1, keepdim=True).sqrt().float().half()


@lru_cache(maxsize=256)
def _planes(dim: int, bits: int) -> PlaneLayout:
    return PlaneLayout(dim, bits, dim, levels=LEVELS[bits])


@lru_cache(maxsize=32)
def _tables(
    bits: int, device: torch.device
) -> tuple[Float32[Tensor, " L"], Float32[Tensor, " bounds"]]:
    """Return the levels, and the bounds between them."""
    levels = LEVELS[bits]
    with torch.inference_mode(False):  # cached tensors outlive the caller
        bounds = [(a + b) / 2 for a, b in pairwise(levels)]
        return (
            torch.tensor(levels, dtype=torch.float32, device=device),
            torch.tensor(bounds, dtype=torch.float32, device=device),
        )
