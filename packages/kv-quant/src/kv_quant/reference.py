"""Reference implementation of the integer codecs: bit by bit, without tensors.

Exact powers of two and Python's own rounding replace the bit tricks of the fast path. It is slow;
the tests compare both byte by byte.
"""

import math
import struct
from collections.abc import Sequence
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
