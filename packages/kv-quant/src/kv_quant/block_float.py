"""Block floating point: signed mantissas that share a power of two."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from kv_policy import PlaneLayout
from kv_quant.affine import clean, expect_rows, expect_vectors, pack, spread, unpack

WIDTHS: Final = (8, 4, 3, 2)  # bits of a mantissa, with its sign


@dataclass(frozen=True, slots=True)
class BlockFloatCodec:
    """Vectors as signed mantissas, and one exponent of 8 bits per group of elements.

    With e the exponent of the largest magnitude of a group, which is in [2**e, 2**(e + 1)), an
    element is m * 2**(e - bits + 2), for a mantissa m of -(2**(bits - 1) - 1) to 2**(bits - 1) - 1:
    rounded half to even and clamped, so an element just below 2**(e + 1) becomes the largest one.
    This is MXINT8 in 8 bits and groups of 32, and its rule for other sizes. Codes are m +
    2**(bits - 1), and the exponent is stored as e + 127, which is 0 for zeros and denormals. No
    step is below 2**-126. Decoded elements are exact products, also in float32.

    Elements beyond +-32752 are stored as such, NaN as 0, as in `IntegerCodec`.

    Source: OCP Microscaling Formats (MX) Specification, Rouhani et al., 2023
    (https://arxiv.org/abs/2310.10537); of caches: Trukhanov and Soloveychik, 2024
    (https://arxiv.org/abs/2403.20137), who also reorder channels in the weights.

    Args:
        dim: D, elements of a vector, 1 or more.
        bits: of a mantissa with its sign: 8, 4, 3 or 2.
        group: elements that share an exponent; the last group may be smaller. 0: all.
    """

    dim: int
    bits: int
    group: int = 0
    block = 1  # every token is encoded independently

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: `dim`, `bits` or `group` is not supported.
        """
        if self.bits not in WIDTHS:
            raise ValueError(f"bits is {self.bits}; a mantissa has 8, 4, 3 or 2 bits")
        if self.dim < 1:
            raise ValueError(f"dim is {self.dim}; a vector has at least 1 element")
        if self.group < 0:
            raise ValueError(f"group is {self.group}; use elements per exponent, or 0 for all")

    @property
    def planes(self) -> PlaneLayout:
        """Position of each code; exponents are bytes, in the order of groups."""
        return PlaneLayout(self.dim, self.bits, self.group or self.dim)

    @property
    def layout(self) -> None:
        """None: kernels read scales and zeros in float16, and no exponents."""
        return None

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of mantissas, and of exponents."""
        return self.planes.stride, self.planes.groups

    @property
    def top(self) -> int:
        """The largest mantissa."""
        return int(2 ** (self.bits - 1)) - 1

    def encode(self, x: Float[Tensor, "n 1 D"]) -> UInt8[Tensor, "n N"]:
        """Encode vectors into mantissas and exponents.

        Raises:
            ValueError: the vectors do not have `dim` elements.
        """
        expect_vectors(x, self.dim)
        inner = clean(x[:, 0])
        exponent = self._exponent(inner)
        mantissa = (inner / self._step(exponent)).round_().clamp_(-self.top, self.top)
        return torch.cat([pack((mantissa + self.top + 1).byte(), self.planes), exponent], dim=1)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float32[Tensor, "n 1 D"]:
        """Decode bytes into float32 vectors.

        Raises:
            ValueError: the rows do not have `sum(parts)` bytes.
        """
        expect_rows(data, sum(self.parts))
        packed, exponent = data.split(self.parts, dim=1)
        mantissa = unpack(packed, self.planes).sub_(self.top + 1)
        return mantissa.mul_(self._step(exponent))[:, None]

    def bound(self, x: Float[Tensor, "n 1 D"]) -> Float[Tensor, "n 1 D"]:
        """Return half a step, or the distance to the largest decoded magnitude beyond it.

        What is clipped is added, which is infinite for an infinity or a NaN.
        """
        given = x[:, 0]
        inner = clean(given)
        step = self._step(self._exponent(inner)).double()
        inside = torch.maximum(step / 2, inner.double().abs() - self.top * step)
        clipped = (given.double() - inner).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        return (inside + clipped)[:, None]

    def _exponent(self, x: Float32[Tensor, "n D"]) -> UInt8[Tensor, "n groups"]:
        """Return the exponent field of the largest magnitude of each group, as in float32."""
        groups, group = self.planes.groups, self.planes.group
        padded = torch.nn.functional.pad(x.abs(), (0, groups * group - self.dim))
        largest = padded.view(-1, groups, group).amax(dim=-1)
        return (largest.view(torch.int32) >> 23).byte()

    def _step(self, exponent: UInt8[Tensor, "n groups"]) -> Float32[Tensor, "n D"]:
        """Return what a mantissa of 1 stands for, by element."""
        field = (exponent.int() - (self.bits - 2)).clamp_(min=1)
        return spread((field << 23).view(torch.float32), self.planes.group, self.dim)
