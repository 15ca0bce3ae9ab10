"""Position of integer codes in bytes, for kernels, and what they stand for."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final


@dataclass(frozen=True, slots=True)
class BitLayout:
    """Position of the integer code of each dimension, for every kernel that reads a format.

    Codes and metadata are two parts. A vector has `stride` bytes of codes: dimension d is in byte
    d % stride, at bit bits * (d // stride), so neighbouring dimensions are in neighbouring bytes
    and one shift unpacks a whole register. The metadata of `tokens` consecutive vectors is a
    float16 scale per group of `group` dimensions, followed by a float16 zero per group.
    A vector is code * scale + zero. Per token: tokens=1, group=dim. Per channel: group=1.

    A codec with `block` tokens has `block` rows of codes in its first part and block / tokens
    metadata records in its second; a page's segment holds the rows of codes, then the records.

    >>> BitLayout(dim=128, bits=4, group=128).place(65)  # byte 1, high nibble
    (1, 4)
    """

    dim: int
    bits: int
    group: int
    tokens: int = 1  # vectors that share scales and zeros

    def __post_init__(self) -> None:
        """Check that no code crosses a byte boundary."""
        if self.bits not in (1, 2, 4, 8):
            raise ValueError(f"bits is {self.bits}; a code has 1, 2, 4 or 8 bits")
        if self.dim < 1 or self.group < 1 or self.tokens < 1:
            raise ValueError(
                f"dim is {self.dim}, group {self.group} and tokens {self.tokens}; all must be at "
                "least 1"
            )

    @property
    def stride(self) -> int:
        """Bytes of codes per vector."""
        return -(-self.dim * self.bits // 8)

    @property
    def groups(self) -> int:
        """Scales (and zeros) per metadata record."""
        return -(-self.dim // self.group)

    @property
    def scale_offset(self) -> int:
        """Byte offset of the first scale in the second part."""
        return 0

    @property
    def zero_offset(self) -> int:
        """Byte offset of the first zero in the second part."""
        return 2 * self.groups

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of the codes of `tokens` vectors, and of their scales and zeros."""
        return self.tokens * self.stride, 4 * self.groups

    def place(self, d: int) -> tuple[int, int]:
        """Return the byte and bit where the code of dimension `d` starts."""
        return d % self.stride, self.bits * (d // self.stride)


WIDTHS: Final = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}  # low bits of a code first
MOST_LEVEL: Final = 2.0**127  # in size


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Codes as planes of 8, 4, 2 or 1 bits, each as in `BitLayout`, one after the other.

    A code of 3 bits is two planes: the low two bits of all dimensions, then the high ones. No part
    of a code crosses a byte, and D codes take 3 D / 8 bytes where D divides by 8. Codes of other
    sizes are one plane. Metadata is as in `BitLayout`, but codes that stand for levels have a scale
    and no zero: an element is level * scale.

    Args:
        dim: D, elements of a vector.
        bits: of one code: 8, 4, 3, 2 or 1.
        group: elements that share a scale and a zero.
        tokens: vectors that share scales and zeros.
        levels: what the codes 0 to 2**bits - 1 stand for, ascending; empty: themselves.
    """

    dim: int
    bits: int
    group: int
    tokens: int = 1
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: there are no codes of this size, a size is below 1, there are not as many
                levels as codes, or these do not ascend.
        """
        if self.bits not in WIDTHS:
            raise ValueError(f"bits is {self.bits}; a code has 1, 2, 3, 4 or 8 bits")
        if self.levels and len(self.levels) != 2**self.bits:
            raise ValueError(
                f"levels are {len(self.levels)}; codes of {self.bits} bits have {2**self.bits}"
            )
        rises = all(a < b for a, b in pairwise(self.levels))
        if not (rises and all(abs(level) <= MOST_LEVEL for level in self.levels)):
            raise ValueError(
                f"levels are {self.levels}; use ascending ones of at most 2**127 in size"
            )
        _ = self.each  # checks the other sizes

    @property
    def each(self) -> tuple[BitLayout, ...]:
        """The planes, the low bits of a code first."""
        return _each(self.dim, self.bits, self.group, self.tokens)

    @property
    def plain(self) -> "BitLayout | PlaneLayout":
        """The same as a `BitLayout`, if it is one."""
        each = self.each
        return self if self.levels or len(each) > 1 else each[0]

    @property
    def stride(self) -> int:
        """Bytes of codes per vector."""
        return sum(plane.stride for plane in self.each)

    @property
    def groups(self) -> int:
        """Scales per metadata record."""
        return self.each[0].groups

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of the codes of `tokens` vectors, and of their scales and zeros."""
        return self.tokens * self.stride, (2 if self.levels else 4) * self.groups

    def place(self, d: int, bit: int) -> tuple[int, int]:
        """Return the byte of a vector's codes, and the bit in it, with a bit of dimension `d`."""
        start, low = 0, 0
        for plane in self.each:
            if bit < low + plane.bits:
                byte, first = plane.place(d)
                return start + byte, first + bit - low
            start, low = start + plane.stride, low + plane.bits
        raise ValueError(f"bit {bit} is given, beyond the {self.bits} of a code")


@lru_cache(maxsize=256)
def _each(dim: int, bits: int, group: int, tokens: int) -> tuple[BitLayout, ...]:
    return tuple(BitLayout(dim, width, group, tokens) for width in WIDTHS[bits])
