"""What the integer codecs share: float16 scales and zeros, and codes side by side in bytes."""

from typing import Final

import torch
from jaxtyping import Float, Float16, Float32, Float64, UInt8
from torch import Tensor

from kv_policy import BitLayout

BITS: Final = (8, 4, 2, 1)

# Half of the largest float16. The span of a vector inside +-LIMIT is a float16 too, so even a scale
# for one bit cannot overflow, and no decoded value overflows when it is cast to float16.
LIMIT: Final = 32752.0


def clean(x: Float[Tensor, "*n"]) -> Float32[Tensor, "*n"]:
    """Float32, without NaN, inside the limits, and with one zero (a sum of 0.0 is never -0.0)."""
    return x.float().nan_to_num(nan=0.0).clamp_(-LIMIT, LIMIT).add_(0.0)


def affine(
    least: Float32[Tensor, "*n"], greatest: Float32[Tensor, "*n"], bits: int
) -> tuple[Float16[Tensor, "*n"], Float16[Tensor, "*n"]]:
    """Give the scale and the zero with which codes reach from the least number to the greatest."""
    flat = least == greatest
    zero = torch.where(flat, least.half(), _float16_below(least))
    span = (greatest - zero.float()).masked_fill(flat, 0)
    # By a tensor: a GPU divides by a number as it multiplies by the inverse, and rounds twice.
    return -_float16_below(-span / torch.full_like(span, 2**bits - 1)), zero


def error(
    x: Float[Tensor, "*n"],
    scale: Float64[Tensor, "*m"],
    zero: Float64[Tensor, "*m"],
    bits: int,
) -> Float64[Tensor, "*n"]:
    """Bound the error of each number: half a scale, and what float32 arithmetic adds."""
    inner = clean(x)
    largest = zero.abs() + (2**bits - 1) * scale
    inside = torch.where(scale > 0, scale / 2 + 2**-21 * largest, (inner - zero).abs())
    return inside + (x.double() - inner).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


def pack(codes: UInt8[Tensor, "n D"], layout: BitLayout) -> UInt8[Tensor, "n stride"]:
    """Put the codes of each vector side by side, as the layout says."""
    stride = layout.stride
    packed = codes[:, :stride].clone()
    for plane in range(1, 8 // layout.bits):
        part = codes[:, plane * stride : (plane + 1) * stride]
        packed[:, : part.shape[1]] |= part << (layout.bits * plane)
    return packed


def unpack(packed: UInt8[Tensor, "n stride"], layout: BitLayout) -> Float32[Tensor, "n D"]:
    """Take the codes of each vector apart again."""
    stride, mask = layout.stride, 2**layout.bits - 1
    codes = packed.new_empty((packed.shape[0], layout.dim), dtype=torch.float32)
    for plane in range(8 // layout.bits):
        part = codes[:, plane * stride : (plane + 1) * stride]
        part.copy_((packed[:, : part.shape[1]] >> (layout.bits * plane)) & mask)
    return codes


def check_size(dim: int, bits: int) -> None:
    """Refuse vectors without elements, and codes of other sizes.

    Raises:
        ValueError: either.
    """
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; an integer code has 8, 4, 2 or 1")
    if dim < 1:
        raise ValueError(f"dim is {dim}; a vector has at least 1 element")


def _float16_below(x: Float32[Tensor, "*n"]) -> Float16[Tensor, "*n"]:
    """Give the largest float16 that is not above x."""
    near = x.half()
    bits = near.view(torch.int16)  # neighbouring numbers have neighbouring patterns
    towards = torch.where(near > 0, bits - 1, torch.where(near < 0, bits + 1, -0x7FFF))
    return torch.where(near.float() > x, towards.to(torch.int16).view(torch.float16), near)
