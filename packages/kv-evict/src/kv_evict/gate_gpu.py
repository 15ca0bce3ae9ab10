"""The kernel of a gate for GPUs: a program computes the scores of some tokens of one KV head."""

from typing import Final, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton import next_power_of_2

from kv_policy.launching import launching_on, strides_of

_BLOCK: Final = 32  # tokens of a program
_STEP: Final = 16  # dimensions that it reads at a time; products of more need many registers
_LEAST: Final = 16  # the smallest size of a matrix product


@triton.jit
@no_type_check
def cosine_and_sine(angle):
    """Return the cosine and the sine of angles in float32, up to about 1e9."""
    size = tl.abs(angle).to(tl.float64)
    quarter = tl.floor(size * 0.63661977236758134 + 0.5)
    x = (size - quarter * 1.5707963267948966).to(tl.float32)
    quarter = quarter.to(tl.int64)
    z = x * x
    # Taylor series, up to a quarter of pi.
    odd = x + x * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z / 362880)))
    even = 1.0 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z / 40320)))
    crossed = (quarter & 1) == 1
    cosine, sine = tl.where(crossed, odd, even), tl.where(crossed, even, odd)
    cosine = tl.where(((quarter + 1) & 2) == 2, -cosine, cosine)
    return cosine, tl.where(((quarter & 2) == 2) != (angle < 0), -sine, sine)


@triton.jit
@no_type_check
def stride_at(strides, i: tl.constexpr, DIM: tl.constexpr):
    """Return a stride of vectors of DIM elements, from `kv_policy.launching.strides_of`."""
    if DIM % 16:
        return strides[i] // 16
    else:
        return strides[i]


@triton.jit(
    do_not_specialize=["place_row", "place_head", "tokens", "first_head"],
    do_not_specialize_on_alignment=["position", "layer"],
)
@no_type_check
def gate_kernel(
    key,
    key_strides,
    value,
    value_strides,
    position,
    place_row,
    place_head,
    layer,
    frequency,
    partner,
    sign,
    linear,
    inner,
    outer,
    out,
    tokens,
    heads,
    all_heads,
    first_head,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
    UNITS: tl.constexpr,
    BY_LAYER: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store the logarithms of the scores, `out` [B, heads, tokens].

    `frequency`, `partner` and `sign` [R, DIM] are of each layer with BY_LAYER, else of all. STEP
    dimensions are read at a time, and PADDED is UNITS rounded up.
    """
    r = tl.program_id(1)
    b, h = (r // heads).to(tl.int64), (r % heads).to(tl.int64)
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there = token < tokens
    at = tl.load(layer + b).to(tl.int64)
    turn = at * 0
    if BY_LAYER:
        turn = at * DIM
    place = position + b * place_row + h * place_head
    place = tl.load(place + token, mask=there, other=0)
    place = tl.maximum(place, 0).to(tl.float32)
    count: tl.constexpr = 2 * DIM + VALUE + 5
    of = at * all_heads + first_head + h
    weights = linear + of * count
    unit = tl.arange(0, PADDED)
    used = unit < UNITS
    columns = inner + of * (count * UNITS) + unit
    hidden = tl.zeros([BLOCK, PADDED], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    key_square = tl.zeros([BLOCK], tl.float32)
    value_square = tl.zeros([BLOCK], tl.float32)

    first_key = b * stride_at(key_strides, 0, DIM) + h * stride_at(key_strides, 1, DIM)
    rows = (key + first_key + token * stride_at(key_strides, 2, DIM))[:, None]
    for first in range(0, DIM, STEP):
        d = first + tl.arange(0, STEP)
        real = d < DIM
        other = tl.load(partner + turn + d, mask=real, other=0).to(tl.int64)
        angle = place[:, None] * tl.load(frequency + turn + d, mask=real, other=0.0)[None, :]
        cosine, sine = cosine_and_sine(angle)
        sine = sine * tl.load(sign + turn + d, mask=real, other=0.0)[None, :]
        some = there[:, None] & real[None, :]
        x = tl.load(rows + d.to(tl.int64)[None, :] * key_strides[3], mask=some, other=0.0)
        y = tl.load(rows + other[None, :] * key_strides[3], mask=some, other=0.0)
        x, y = x.to(tl.float32), y.to(tl.float32)
        plain, pair = x * cosine + y * sine, tl.sqrt_rn(x * x + y * y)
        key_square += tl.sum(plain * plain, 1)
        total += tl.sum(plain * tl.load(weights + d, mask=real, other=0.0)[None, :], 1)
        d = d + DIM + VALUE
        total += tl.sum(pair * tl.load(weights + d, mask=real, other=0.0)[None, :], 1)
        some = real[:, None] & used[None, :]
        of_pairs = tl.load(columns[None, :] + d[:, None] * UNITS, mask=some, other=0.0)
        hidden = tl.dot(pair, of_pairs, hidden, input_precision="ieee")
        d = d - DIM - VALUE
        of_keys = tl.load(columns[None, :] + d[:, None] * UNITS, mask=some, other=0.0)
        hidden = tl.dot(plain, of_keys, hidden, input_precision="ieee")

    first_value = b * stride_at(value_strides, 0, VALUE) + h * stride_at(value_strides, 1, VALUE)
    rows = (value + first_value + token * stride_at(value_strides, 2, VALUE))[:, None]
    for first in range(0, VALUE, STEP):
        d = first + tl.arange(0, STEP)
        real = d < VALUE
        some = there[:, None] & real[None, :]
        x = tl.load(rows + d.to(tl.int64)[None, :] * value_strides[3], mask=some, other=0.0)
        x = x.to(tl.float32)
        value_square += tl.sum(x * x, 1)
        d = d + DIM
        total += tl.sum(x * tl.load(weights + d, mask=real, other=0.0)[None, :], 1)
        some = real[:, None] & used[None, :]
        of_values = tl.load(columns[None, :] + d[:, None] * UNITS, mask=some, other=0.0)
        hidden = tl.dot(x, of_values, hidden, input_precision="ieee")

    weights += 2 * DIM + VALUE
    columns += (2 * DIM + VALUE) * UNITS
    key_norm, value_norm = tl.sqrt_rn(key_square), tl.sqrt_rn(value_square)
    for i in tl.static_range(4):
        norm = key_norm if i % 2 == 0 else value_norm
        scalar = norm if i < 2 else tl.log(norm + 1e-6)
        total += scalar * tl.load(weights + i)
        weight = tl.load(columns + i * UNITS, mask=used, other=0.0)
        hidden += scalar[:, None] * weight[None, :]
    total += tl.load(weights + 4)
    hidden += tl.load(columns + 4 * UNITS, mask=used, other=0.0)[None, :]
    hidden = tl.where(hidden < 0, 0.0, hidden)  # NaN remains NaN
    hidden = hidden * tl.load(outer + of * UNITS + unit, mask=used, other=0.0)[None, :]
    # Units of padding are left out: 0 times infinity is NaN.
    total += tl.sum(tl.where(used[None, :], hidden, 0.0), 1)
    tl.store(out + r.to(tl.int64) * tokens + token, total, mask=there)


def gate(
    key: Float[Tensor, "B H L D"],
    value: Float[Tensor, "B H L Dv"],
    position: Int[Tensor, "B H L"],
    layer: Int[Tensor, " B"],
    turns: tuple[Float[Tensor, "R D"], Int[Tensor, "R D"], Float[Tensor, "R D"]],
    weights: tuple[Float[Tensor, "N M F"], Float[Tensor, "N M F U"], Float[Tensor, "N M U"]],
    first_head: int,
) -> Float[Tensor, "B H L"]:
    """Return the logarithms of the scores; `turns` are frequencies, partners and signs."""
    sequences, heads, tokens, dim = key.shape
    value_dim, units = value.shape[-1], weights[2].shape[-1]
    out = torch.empty(position.shape, dtype=torch.float32, device=key.device)
    if out.numel() == 0:
        return out
    position = position if position.stride(2) == 1 else position.contiguous()
    with launching_on(key):
        gate_kernel[(triton.cdiv(tokens, _BLOCK), sequences * heads)](
            key,
            strides_of(key),
            value,
            strides_of(value),
            position,
            position.stride(0),
            position.stride(1),
            layer,
            *turns,
            *weights,
            out,
            tokens,
            heads,
            weights[0].shape[1],
            first_head,
            DIM=dim,
            VALUE=value_dim,
            UNITS=units,
            BY_LAYER=len(turns[0]) > 1,
            BLOCK=_BLOCK,
            STEP=_STEP,
            PADDED=max(_LEAST, next_power_of_2(units)),
        )
    return out
