"""Position of integer codes of 1, 2, 3, 4 or 8 bits in bytes."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kv_policy import BitLayout

WIDTHS: Final = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}  # low bits of a code first


@dataclass(frozen=True, slots=True)
class Planes:
    """Codes as planes of 8, 4, 2 or 1 bits, each as in `BitLayout`, one after the other.

    A code of 3 bits is two planes: the low two bits of all dimensions, then the high ones. No part
    of a code crosses a byte, and D codes take 3 D / 8 bytes where D divides by 8. Codes of other
    sizes are one plane, which kernels read. Metadata is as in `BitLayout`.

    Args:
        dim: D, elements of a vector.
        bits: of one code: 8, 4, 3, 2 or 1.
        group: elements that share a scale and a zero.
        tokens: vectors that share scales and zeros.
    """

    dim: int
    bits: int
    group: int
    tokens: int = 1

    @property
    def each(self) -> tuple[BitLayout, ...]:
        """The planes, the low bits of a code first."""
        return _each(self)

    @property
    def layout(self) -> BitLayout | None:
        """The layout that kernels read: of the only plane; None if there are two."""
        return self.each[0] if len(WIDTHS[self.bits]) == 1 else None

    @property
    def stride(self) -> int:
        """Bytes of codes per vector."""
        return sum(plane.stride for plane in self.each)

    @property
    def groups(self) -> int:
        """Scales (and zeros) per metadata record."""
        return self.each[0].groups

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of the codes of `tokens` vectors, and of their scales and zeros."""
        return self.tokens * self.stride, self.each[0].parts[1]

    def place(self, d: int, bit: int) -> tuple[int, int]:
        """Return the byte of a vector's codes, and the bit in it, with a bit of dimension `d`."""
        start = 0
        for plane in self.each:
            if bit < plane.bits:
                byte, first = plane.place(d)
                return start + byte, first + bit
            start, bit = start + plane.stride, bit - plane.bits
        raise ValueError(f"bit {bit} is given, beyond the {self.bits} of a code")


@lru_cache(maxsize=256)
def _each(planes: Planes) -> tuple[BitLayout, ...]:
    widths = WIDTHS[planes.bits]
    return tuple(BitLayout(planes.dim, bits, planes.group, planes.tokens) for bits in widths)
