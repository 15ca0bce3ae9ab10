"""Shared by the integer codecs: float16 scales and zeros, and bit packing of codes."""

from typing import Final

import torch
from jaxtyping import Float, Float16, Float32, Float64, UInt8
from torch import Tensor

from kv_policy import BitLayout, PlaneLayout
from kv_policy.bit_layout import WIDTHS

# Half of the largest float16. The span of a vector inside +-LIMIT is a float16 too, so even a 1-bit
# scale cannot overflow, nor can a decoded value that is cast to float16.
LIMIT: Final = 32752.0


def clean(x: Float[Tensor, "*n"]) -> Float32[Tensor, "*n"]:
    """Return float32 without NaN, clamped to the limits, with a single zero (0.0, never -0.0)."""
    return x.float().nan_to_num(nan=0.0).clamp_(-LIMIT, LIMIT).add_(0.0)


def expect_vectors(x: Float[Tensor, "n 1 D"], dim: int) -> None:
    """Raise unless these are vectors of `dim` elements.

    Raises:
        ValueError: they are not; the message has their shape.
    """
    if x.shape[1:] != (1, dim):
        raise ValueError(f"vectors have shape {tuple(x.shape)}; expected n, 1, {dim}")


def expect_rows(data: UInt8[Tensor, "n N"], nbytes: int) -> None:
    """Raise unless these are encoded vectors of `nbytes` bytes.

    Raises:
        ValueError: they are not; the message has the bytes of a row.
    """
    if data.shape[1] != nbytes:
        raise ValueError(f"a row has {data.shape[1]} bytes; a vector of this codec has {nbytes}")


def affine(
    least: Float32[Tensor, "*n"], greatest: Float32[Tensor, "*n"], bits: int
) -> tuple[Float16[Tensor, "*n"], Float16[Tensor, "*n"]]:
    """Return the scale and zero with which the codes cover the range from least to greatest."""
    flat = least == greatest
    zero = torch.where(flat, least.half(), _float16_below(least))
    span = (greatest - zero.float()).masked_fill(flat, 0)
    # Divide by a tensor: a GPU divides by a scalar via its inverse, which rounds twice.
    return -_float16_below(-span / torch.full_like(span, 2**bits - 1)), zero


def error(
    x: Float[Tensor, "*n"],
    scale: Float64[Tensor, "*m"],
    zero: Float64[Tensor, "*m"],
    bits: int,
) -> Float64[Tensor, "*n"]:
    """Bound each element's error: half a scale plus the error of float32 arithmetic."""
    inner = clean(x)
    largest = zero.abs() + (2**bits - 1) * scale
    inside = torch.where(scale > 0, scale / 2 + 2**-21 * largest, (inner - zero).abs())
    return inside + (x.double() - inner).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


def spread(per_group: Float[Tensor, "n groups"], group: int, dim: int) -> Float[Tensor, "n _"]:
    """Expand the numbers of each group to its elements; one group broadcasts."""
    if per_group.shape[1] == 1:
        return per_group
    return per_group.repeat_interleave(group, dim=1)[:, :dim]


def pack(codes: UInt8[Tensor, "n D"], planes: PlaneLayout) -> UInt8[Tensor, "n stride"]:
    """Pack the codes of each vector into bytes."""
    each = planes.each
    if len(each) == 1:
        return _pack(codes, each[0])
    packed, low = [], 0
    for plane in each:
        packed.append(_pack((codes >> low) & (2**plane.bits - 1), plane))
        low += plane.bits
    return torch.cat(packed, dim=1)


def unpack(packed: UInt8[Tensor, "n stride"], planes: PlaneLayout) -> Float32[Tensor, "n D"]:
    """Unpack the codes of each vector."""
    first, *others = planes.each
    codes = _unpack(packed[:, : first.stride], first)
    start, low = first.stride, first.bits
    for plane in others:
        part = _unpack(packed[:, start : start + plane.stride], plane)
        codes.add_(part, alpha=2**low)
        start, low = start + plane.stride, low + plane.bits
    return codes


def _pack(codes: UInt8[Tensor, "n D"], layout: BitLayout) -> UInt8[Tensor, "n stride"]:
    stride = layout.stride
    packed = codes[:, :stride].clone()
    for plane in range(1, 8 // layout.bits):
        part = codes[:, plane * stride : (plane + 1) * stride]
        packed[:, : part.shape[1]] |= part << (layout.bits * plane)
    return packed


def _unpack(packed: UInt8[Tensor, "n stride"], layout: BitLayout) -> Float32[Tensor, "n D"]:
    stride, mask = layout.stride, 2**layout.bits - 1
    codes = packed.new_empty((packed.shape[0], layout.dim), dtype=torch.float32)
    for plane in range(8 // layout.bits):
        part = codes[:, plane * stride : (plane + 1) * stride]
        part.copy_((packed[:, : part.shape[1]] >> (layout.bits * plane)) & mask)
    return codes


def check_size(dim: int, bits: int) -> None:
    """Raise for empty vectors and unsupported code sizes.

    Raises:
        ValueError: `dim` or `bits` is not supported.
    """
    if bits not in WIDTHS:
        raise ValueError(f"bits is {bits}; an integer code has 8, 4, 3, 2 or 1 bits")
    if dim < 1:
        raise ValueError(f"dim is {dim}; a vector has at least 1 element")


def _float16_below(x: Float32[Tensor, "*n"]) -> Float16[Tensor, "*n"]:
    """Return the largest float16 not above x."""
    near = x.half()
    bits = near.view(torch.int16)  # adjacent floats have adjacent bit patterns
    towards = torch.where(near > 0, bits - 1, torch.where(near < 0, bits + 1, -0x7FFF))
    return torch.where(near.float() > x, towards.to(torch.int16).view(torch.float16), near)
