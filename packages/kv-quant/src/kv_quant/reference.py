"""Reference implementation of the integer codecs: bit by bit, without tensors.

Exact powers of two and Python's own rounding replace the bit tricks of the fast path. It is slow;
the tests compare both byte by byte.
"""

import math
import struct
from collections.abc import Sequence
from typing import Final

from kv_policy import BitLayout

LIMIT: Final = 65504 / 2


def encode(layout: BitLayout, vectors: Sequence[Sequence[float]]) -> bytes:
    """Encode a block of vectors: rows of codes, then records of metadata."""
    records = len(vectors) // layout.tokens
    codes = bytearray(len(vectors) * layout.stride)
    meta = bytearray(records * layout.parts[1])
    for record in range(records):
        tokens = range(record * layout.tokens, (record + 1) * layout.tokens)
        at = record * layout.parts[1]
        for group in range(layout.groups):
            dims = range(group * layout.group, min((group + 1) * layout.group, layout.dim))
            clean = {(t, d): _clean(vectors[t][d]) for t in tokens for d in dims}
            scale, zero = _affine(list(clean.values()), 2**layout.bits - 1)
            struct.pack_into("<e", meta, at + layout.scale_offset + 2 * group, scale)
            struct.pack_into("<e", meta, at + layout.zero_offset + 2 * group, zero)
            for (t, d), x in clean.items():
                code = round(_float32(_float32(x - zero) / scale)) if scale else 0
                byte, start = layout.place(d)
                for bit in range(layout.bits):
                    codes[t * layout.stride + byte] |= (code >> bit & 1) << (start + bit)
    return bytes(codes + meta)


def decode(layout: BitLayout, data: bytes, count: int = 1) -> list[list[float]]:
    """Decode a block of `count` vectors to float32 numbers."""
    meta, vectors = data[count * layout.stride :], []
    for t in range(count):
        vector, at = [], t // layout.tokens * layout.parts[1]
        for d in range(layout.dim):
            byte, start = layout.place(d)
            stored = data[t * layout.stride + byte]
            code = sum((stored >> (start + bit) & 1) << bit for bit in range(layout.bits))
            group = at + 2 * (d // layout.group)
            (scale,) = struct.unpack_from("<e", meta, layout.scale_offset + group)
            (zero,) = struct.unpack_from("<e", meta, layout.zero_offset + group)
            vector.append(_float32(code * scale + zero))
        vectors.append(vector)
    return vectors


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
