"""Reference implementation of the integer codecs: bit by bit, without tensors.

Exact powers of two and Python's own rounding replace the bit tricks of the fast path. It is slow;
the tests compare both byte by byte.
"""

import math
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from kv_policy import PlaneLayout

LIMIT: Final = 65504 / 2


def encode(planes: PlaneLayout, vectors: Sequence[Sequence[float]]) -> bytes:
    """Encode a block of vectors: rows of codes, then records of metadata."""
    records = len(vectors) // planes.tokens
    codes = bytearray(len(vectors) * planes.stride)
    meta = bytearray(records * planes.parts[1])
    for record in range(records):
        tokens = range(record * planes.tokens, (record + 1) * planes.tokens)
        at = record * planes.parts[1]
        for group in range(planes.groups):
            dims = range(group * planes.group, min((group + 1) * planes.group, planes.dim))
            clean = {(t, d): _clean(vectors[t][d]) for t in tokens for d in dims}
            scale, zero = _affine(list(clean.values()), 2**planes.bits - 1)
            struct.pack_into("<e", meta, at + 2 * group, scale)
            struct.pack_into("<e", meta, at + 2 * (planes.groups + group), zero)
            for (t, d), x in clean.items():
                code = round(_float32(_float32(x - zero) / scale)) if scale else 0
                _set(codes, t * planes.stride, planes, d, code)
    return bytes(codes + meta)


def decode(planes: PlaneLayout, data: bytes, count: int = 1) -> list[list[float]]:
    """Decode a block of `count` vectors to float32 numbers."""
    meta, vectors = data[count * planes.stride :], []
    for t in range(count):
        vector, at = [], t // planes.tokens * planes.parts[1]
        for d in range(planes.dim):
            code = _get(data, t * planes.stride, planes, d)
            group = at + 2 * (d // planes.group)
            (scale,) = struct.unpack_from("<e", meta, group)
            (zero,) = struct.unpack_from("<e", meta, 2 * planes.groups + group)
            vector.append(_float32(code * scale + zero))
        vectors.append(vector)
    return vectors


def encode_levels(planes: PlaneLayout, levels: Sequence[float], vector: Sequence[float]) -> bytes:
    """Encode a vector by a codebook: codes of the nearest levels, then the root mean square."""
    clean = [_clean(x) for x in vector]
    mean = math.fsum(x * x for x in clean) / len(clean)
    size = struct.pack("<e", _float32(math.sqrt(mean)))
    (scale,) = struct.unpack("<e", size)
    bounds = [_float32((a + b) / 2) for a, b in pairwise(levels)]
    codes = bytearray(planes.stride)
    for d, x in enumerate(clean):
        at = _float32(x / scale) if scale else 0.0
        _set(codes, 0, planes, d, sum(bound < at for bound in bounds))
    return bytes(codes) + size


def decode_levels(planes: PlaneLayout, levels: Sequence[float], data: bytes) -> list[float]:
    """Decode a vector to float32 numbers: the level of each code times the root mean square."""
    (scale,) = struct.unpack_from("<e", data, planes.stride)
    return [_float32(_float32(levels[_get(data, 0, planes, d)]) * scale) for d in range(planes.dim)]


def encode_fitted(planes: PlaneLayout, levels: Sequence[float], vector: Sequence[float]) -> bytes:
    """Encode a vector by levels of its range: codes of the nearest ones, then scale and zero."""
    clean = [_clean(x) for x in vector]
    scale, zero = _affine(clean, 2**planes.bits - 1)
    bounds = [_float32((a + b) / 2) for a, b in pairwise(levels)]
    codes = bytearray(planes.stride)
    for d, x in enumerate(clean):
        at = _float32(_float32(x - zero) / scale) if scale else 0.0
        _set(codes, 0, planes, d, sum(bound < at for bound in bounds))
    return bytes(codes) + struct.pack("<2e", scale, zero)


def decode_fitted(planes: PlaneLayout, levels: Sequence[float], data: bytes) -> list[float]:
    """Decode a vector to float32 numbers: the level of each code times the scale, and the zero."""
    scale, zero = struct.unpack_from("<2e", data, planes.stride)
    codes = (_get(data, 0, planes, d) for d in range(planes.dim))
    return [_float32(_float32(_float32(levels[code]) * scale) + zero) for code in codes]


def encode_block_float(planes: PlaneLayout, vector: Sequence[float]) -> bytes:
    """Encode a vector in block floating point: mantissas, then the exponent of each group."""
    clean = [_clean(x) for x in vector]
    codes, exponents, half = bytearray(planes.stride), bytearray(), 2 ** (planes.bits - 1)
    for group in range(planes.groups):
        dims = range(group * planes.group, min((group + 1) * planes.group, planes.dim))
        largest = max(abs(clean[d]) for d in dims)
        exponents.append(max(math.frexp(largest)[1] + 126, 0) if largest else 0)
        for d in dims:
            mantissa = round(clean[d] / _step(planes, exponents[-1]))
            _set(codes, 0, planes, d, half + max(min(mantissa, half - 1), 1 - half))
    return bytes(codes + exponents)


def decode_block_float(planes: PlaneLayout, data: bytes) -> list[float]:
    """Decode a vector to float32 numbers: each mantissa times the step of its group."""
    half, exponents = 2 ** (planes.bits - 1), data[planes.stride :]
    return [
        (_get(data, 0, planes, d) - half) * _step(planes, exponents[d // planes.group])
        for d in range(planes.dim)
    ]


def _step(planes: PlaneLayout, exponent: int) -> float:
    return 2.0 ** (max(exponent - planes.bits + 2, 1) - 127)


def encode_outliers(
    encode: Callable[[Sequence[float]], bytes], vector: Sequence[float], count: int
) -> bytes:
    """Encode a vector with outliers: the others by `encode`, then indices, then float16 values."""
    clean = [_clean(x) for x in vector]
    order = sorted(range(len(clean)), key=lambda d: clean[d])

    def others(small: int) -> list[int]:
        return order[small : len(order) - count + small]

    def span(small: int) -> float:
        return _float32(clean[others(small)[-1]] - clean[others(small)[0]])

    kept = others(min(range(count + 1), key=span))
    low, high = clean[kept[0]], clean[kept[-1]]
    apart = [d for d in order if d not in kept]
    places = bytes(d & 255 for d in apart)
    if len(clean) > 256:
        places += bytes(d >> 8 for d in apart)
    values = b"".join(struct.pack("<e", clean[d]) for d in apart)
    return encode([min(max(x, low), high) for x in clean]) + places + values


def decode_outliers(
    decode: Callable[[bytes], list[float]], data: bytes, dim: int, count: int
) -> list[float]:
    """Decode a vector to float32 numbers: the others by `decode`, with the outliers in place."""
    width = 1 if dim <= 256 else 2
    split = len(data) - (width + 2) * count
    places, values = data[split : split + width * count], data[split + width * count :]
    vector = decode(data[:split])
    for i in range(count):
        d = sum(places[i + count * byte] << 8 * byte for byte in range(width))
        (vector[d],) = struct.unpack_from("<e", values, 2 * i)
    return vector


def _set(codes: bytearray, start: int, planes: PlaneLayout, d: int, code: int) -> None:
    for bit in range(planes.bits):
        byte, at = planes.place(d, bit)
        codes[start + byte] |= (code >> bit & 1) << at


def _get(codes: bytes, start: int, planes: PlaneLayout, d: int) -> int:
    places = (planes.place(d, bit) for bit in range(planes.bits))
    return sum((codes[start + byte] >> at & 1) << bit for bit, (byte, at) in enumerate(places))


def _clean(x: float) -> float:
    if math.isnan(x):
        return 0.0
    return _float32(min(max(x, -LIMIT), LIMIT)) + 0.0


def _affine(group: list[float], top: int) -> tuple[float, float]:
    least, greatest = min(group), max(group)
    if least == greatest:
        return 0.0, struct.unpack("<e", struct.pack("<e", least))[0]
    step = _float16_step(least)
    zero = math.floor(least / step) * step
    wanted = _float32(_float32(greatest - zero) / top)
    step = _float16_step(wanted)
    return math.ceil(wanted / step) * step, zero


def _float16_step(x: float) -> float:
    """Return the spacing of float16 at x: 11 significant bits, none below 2**-24."""
    return 2.0 ** max(math.frexp(x)[1] - 11, -24)


def _float32(x: float) -> float:
    """Round to the nearest float32, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])
