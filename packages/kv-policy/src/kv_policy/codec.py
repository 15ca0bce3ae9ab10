"""How a vector becomes bytes: the protocol of a codec, and its bit layout as data."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float, UInt8
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BitLayout:
    """Where the integer code of each dimension lies, for every kernel that reads a format.

    Codes and metadata are two parts. A vector has `stride` bytes of codes: dimension d is in byte
    d % stride, at bit bits * (d // stride), so neighbouring dimensions are in neighbouring bytes
    and one shift unpacks a whole register. The metadata of `tokens` consecutive vectors is a
    float16 scale per group of `group` dimensions, and after all scales a float16 zero per group.
    A vector is code * scale + zero. Per token: tokens=1, group=dim. Per channel: group=1.

    A codec of `block` tokens has `block` rows of codes in its first part, and block / tokens
    records of metadata in its second, so a page's segment is rows of codes, then of records.

    >>> BitLayout(dim=128, bits=4, group=128).place(65)  # byte 1, high nibble
    (1, 4)
    """

    dim: int
    bits: int
    group: int
    tokens: int = 1  # vectors that share their scales and zeros

    def __post_init__(self) -> None:
        """Check that no code crosses a byte."""
        if self.bits not in (1, 2, 4, 8):
            raise ValueError(f"bits is {self.bits}; a code takes 1, 2, 4 or 8 bits")
        if self.dim < 1 or self.group < 1 or self.tokens < 1:
            raise ValueError(
                f"dim is {self.dim}, group {self.group} and tokens {self.tokens}; all must be at "
                "least 1"
            )

    @property
    def stride(self) -> int:
        """Bytes of codes in one vector."""
        return -(-self.dim * self.bits // 8)

    @property
    def groups(self) -> int:
        """Scales (and zeros) in one record of metadata."""
        return -(-self.dim // self.group)

    @property
    def scale_offset(self) -> int:
        """Byte of the first scale inside the second part."""
        return 0

    @property
    def zero_offset(self) -> int:
        """Byte of the first zero inside the second part."""
        return 2 * self.groups

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of the codes of `tokens` vectors, and of their scales with zeros."""
        return self.tokens * self.stride, 4 * self.groups

    def place(self, d: int) -> tuple[int, int]:
        """Byte and bit where the code of dimension `d` starts."""
        return d % self.stride, self.bits * (d // self.stride)


@runtime_checkable
class Codec(Protocol):
    """Stores `block` consecutive vectors of one head in exactly `sum(parts)` bytes."""

    @property
    def dim(self) -> int:
        """D, length of a vector."""
        ...

    @property
    def block(self) -> int:
        """S, tokens encoded together; 1 where every token stands alone."""
        ...

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each part of one encoded block; a page keeps equal parts side by side."""
        ...

    @property
    def layout(self) -> BitLayout | None:
        """The codes as data for kernels, or None: only `decode` can read this codec."""
        ...

    def encode(self, x: Float[Tensor, "n S D"]) -> UInt8[Tensor, "n N"]:
        """Turn n blocks into N = sum(parts) bytes each."""
        ...

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float[Tensor, "n S D"]:
        """Turn bytes back into vectors, in float32 or in the dtype stored."""
        ...

    def bound(self, x: Float[Tensor, "n S D"]) -> Float[Tensor, "n S D"]:
        """Largest absolute error that decode(encode(x)) may have, element by element."""
        ...


@dataclass(frozen=True, slots=True)
class TokenFormat:
    """How one tier stores a token of one head: a codec for its key, one for its value.

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
        """Check that both codecs advance by the same number of tokens."""
        if self.key.block != self.value.block:
            raise ValueError(
                f"the key codec takes {self.key.block} tokens at a time and the value codec "
                f"{self.value.block}; a tier needs the same for both"
            )
        # Asked for at every step of every layer, so worked out once.
        object.__setattr__(self, "block", self.key.block)
        object.__setattr__(self, "parts", (*self.key.parts, *self.value.parts))
        object.__setattr__(self, "nbytes", sum(self.parts))
