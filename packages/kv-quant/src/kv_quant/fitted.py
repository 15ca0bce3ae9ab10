"""Levels between the least and the greatest element of a vector, fitted to a model."""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Float, Float16, Float32, UInt8
from torch import Tensor

from kv_policy import PlaneLayout
from kv_quant.affine import affine, clean, expect_rows, expect_vectors, pack, unpack

BITS: Final = (4, 3, 2, 1)  # of codes that stand for levels


@dataclass(frozen=True, slots=True)
class LevelsCodec:
    """Codes of levels in units of a vector's range, with its scale and its zero.

    Scale and zero are those of `IntegerCodec`, so even steps are the levels 0 to 2**bits - 1. An
    element is (x - zero) / scale in float32, and is stored as the nearest level; of two that are
    equally near the lower is taken. A decoded element is level * scale + zero, each rounded to
    float32. A vector of equal elements decodes to their nearest float16.

    Elements beyond +-32752 are stored as such, NaN as 0, as in `IntegerCodec`.

    Source: Hooper et al., 2024, KVQuant (https://arxiv.org/abs/2401.18079), section 3.3: nuq.

    Args:
        dim: D, elements of a vector, 1 or more.
        bits: of one code: 4, 3, 2 or 1.
        levels: ascending, as many as there are codes, from 0 to 2**bits - 1.
    """

    dim: int
    bits: int
    levels: tuple[float, ...]
    block = 1  # every token is encoded independently

    def __post_init__(self) -> None:
        """Check the sizes and the levels.

        Raises:
            ValueError: `dim` or `bits` is not supported, or the levels are not ascending, not as
                many as the codes, or beyond their range.
        """
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits}; levels have codes of 4, 3, 2 or 1 bits")
        if self.dim < 1:
            raise ValueError(f"dim is {self.dim}; a vector has at least 1 element")
        count = 2**self.bits
        if len(self.levels) != count or not all(a < b for a, b in pairwise(self.levels)):
            raise ValueError(
                f"levels are {self.levels}; codes of {self.bits} bits have {count}, ascending"
            )
        if not 0 <= self.levels[0] <= self.levels[-1] <= count - 1:
            raise ValueError(
                f"levels are {self.levels}; in units of the scale they are from 0 to {count - 1}"
            )

    @property
    def digest(self) -> str:
        """The SHA-256 of the levels."""
        return sha256(repr(self.levels).encode()).hexdigest()

    @property
    def planes(self) -> PlaneLayout:
        """Position of each code, scale and zero."""
        return PlaneLayout(self.dim, self.bits, self.dim)

    @property
    def layout(self) -> None:
        """None: codebooks of kernels have no zero."""
        return None

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of codes, and of the scale and the zero."""
        return self.planes.parts

    def encode(self, x: Float[Tensor, "n 1 D"]) -> UInt8[Tensor, "n N"]:
        """Encode vectors into codes, a scale and a zero.

        Raises:
            ValueError: the vectors do not have `dim` elements.
        """
        expect_vectors(x, self.dim)
        place, scale, zero = placed(clean(x[:, 0]), self.bits)
        _, bounds = _tables(self.levels, x.device)
        codes = torch.bucketize(place, bounds, out_int32=True)
        packed = pack(codes.to(torch.uint8), self.planes)
        return torch.cat([packed, scale.view(torch.uint8), zero.view(torch.uint8)], dim=1)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float32[Tensor, "n 1 D"]:
        """Decode bytes into float32 vectors: level * scale + zero.

        Raises:
            ValueError: the rows do not have `sum(parts)` bytes.
        """
        stride = self.planes.stride
        expect_rows(data, sum(self.parts))
        meta = data[:, stride:].clone(memory_format=torch.contiguous_format)  # aligned to float16
        scale, zero = meta.view(torch.float16).float().chunk(2, dim=1)
        levels, _ = _tables(self.levels, data.device)
        codes = unpack(data[:, :stride], self.planes).int()
        return (levels[codes] * scale).add_(zero)[:, None]

    def bound(self, x: Float[Tensor, "n 1 D"]) -> Float[Tensor, "n 1 D"]:
        """Return the largest distance to a level, and 2**-20 of the largest element, as a bound.

        The error of a vector of equal elements is their rounding to float16. What is clipped is
        added, which is infinite for an infinity or a NaN.
        """
        given = x[:, 0]
        inner = clean(given)
        _, scale, zero = placed(inner, self.bits)
        top, first, last = 2**self.bits - 1, self.levels[0], self.levels[-1]
        step = max((b - a) / 2 for a, b in pairwise(self.levels))
        wide, low = scale.double(), zero.double()
        largest = low.abs() + top * wide
        inside = max(step, first, top - last) * wide + 2**-20 * largest
        inside = torch.where(wide > 0, inside, (inner - low).abs())
        clipped = (given.double() - inner).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        return (inside + clipped)[:, None]


def placed(
    x: Float32[Tensor, "n D"], bits: int
) -> tuple[Float32[Tensor, "n D"], Float16[Tensor, "n 1"], Float16[Tensor, "n 1"]]:
    """Return elements in units of the scale from the zero on, and the scale and the zero.

    Elements are from 0 to 2**bits - 1, up to rounding, and 0 in a vector of equal elements.
    """
    scale, zero = affine(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), bits)
    divisor = scale.float().masked_fill(scale == 0, torch.inf)
    return (x - zero.float()) / divisor, scale, zero


@lru_cache(maxsize=32)
def _tables(
    levels: tuple[float, ...], device: torch.device
) -> tuple[Float32[Tensor, " L"], Float32[Tensor, " bounds"]]:
    """Return the levels, and the bounds between them."""
    with torch.inference_mode(False):  # cached tensors outlive the caller
        bounds = [(a + b) / 2 for a, b in pairwise(levels)]
        return (
            torch.tensor(levels, dtype=torch.float32, device=device),
            torch.tensor(bounds, dtype=torch.float32, device=device),
        )
