"""Codecs: the protocol that turns vectors into bytes, and the bit layout for kernels."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float, UInt8
from torch import Tensor


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


@runtime_checkable
class Codec(Protocol):
    """Encodes `block` consecutive vectors of one head into exactly `sum(parts)` bytes."""

    @property
    def dim(self) -> int:
        """D, the vector length."""
        ...

    @property
    def block(self) -> int:
        """S, tokens encoded together; 1 where every token is encoded separately."""
        ...

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each part of an encoded block; a page stores equal parts contiguously."""
        ...

    @property
    def layout(self) -> BitLayout | None:
        """Bit layout of the codes for kernels, or None: only `decode` reads this codec."""
        ...

    def encode(self, x: Float[Tensor, "n S D"]) -> UInt8[Tensor, "n N"]:
        """Encode n blocks into N = sum(parts) bytes each."""
        ...

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float[Tensor, "n S D"]:
        """Decode bytes into vectors, in float32 or in the stored dtype."""
        ...

    def bound(self, x: Float[Tensor, "n S D"]) -> Float[Tensor, "n S D"]:
        """Return the elementwise upper bound of the absolute error of decode(encode(x))."""
        ...


@dataclass(frozen=True, slots=True)
class TokenFormat:
    """Storage format of a tier: a codec for keys and one for values.

    Attributes:
        key: Codec of keys.
        value: Codec of values.
        block: Tokens encoded together.
        parts: Bytes of every part of one block: the key's, then the value's.
        nbytes: Bytes of one block, metadata included.
    """

    key: Codec
    value: Codec
    block: int = field(init=False, repr=False, compare=False)
    parts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that both codecs have the same block."""
        if self.key.block != self.value.block:
            raise ValueError(
                f"the key codec encodes {self.key.block} tokens together and the value codec "
                f"{self.value.block}; both must be equal in a tier"
            )
        # Cached: read at every step of every layer.
        object.__setattr__(self, "block", self.key.block)
        object.__setattr__(self, "parts", (*self.key.parts, *self.value.parts))
        object.__setattr__(self, "nbytes", sum(self.parts))
