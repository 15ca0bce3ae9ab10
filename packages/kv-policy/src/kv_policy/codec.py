"""Codecs: the protocol that turns vectors into bytes."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kv_policy.bit_layout import BitLayout, PlaneLayout


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
    def layout(self) -> BitLayout | PlaneLayout | None:
        """Layout of the codes for kernels, or None: only `decode` reads this codec."""
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


@runtime_checkable
class FittedCodec(Protocol):
    """A codec whose bytes may depend on numbers of a file, such as levels fitted to a model."""

    @property
    def digest(self) -> str | None:
        """Digest of these numbers; None: there are none."""
        ...


@dataclass(frozen=True, slots=True)
class KeyPrefix:
    """Values that are the first `dim` dimensions of their keys, and have no bytes of their own.

    So latent attention stores each token once (DeepSeek-AI 2024, DeepSeek-V2). Unlike other codecs,
    `decode` takes the bytes of the key: those in `TokenFormat.value_parts`.

    Attributes:
        key: Codec of the keys.
        dim: Dv, dimensions of a value.
    """

    key: Codec
    dim: int

    def __post_init__(self) -> None:
        """Check that a key has as many dimensions."""
        if not 1 <= self.dim <= self.key.dim:
            raise ValueError(
                f"values are the first {self.dim} dimensions of keys that have {self.key.dim}; "
                f"use 1 to {self.key.dim}"
            )

    @property
    def block(self) -> int:
        """S, tokens encoded together in keys."""
        return self.key.block

    @property
    def parts(self) -> tuple[int, ...]:
        """No bytes."""
        return ()

    @property
    def layout(self) -> BitLayout | None:
        """None: only `decode` reads values."""
        return None

    def encode(self, x: Float[Tensor, "n S D"]) -> UInt8[Tensor, "n 0"]:
        """Return no bytes."""
        return torch.empty(len(x), 0, dtype=torch.uint8, device=x.device)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float[Tensor, "n S D"]:
        """Decode the bytes of keys into values."""
        return self.key.decode(data)[..., : self.dim]

    def bound(self, x: Float[Tensor, "n S D"]) -> Float[Tensor, "n S D"]:
        """Return infinity: the error depends on the whole key."""
        return torch.full_like(x, torch.inf)


@dataclass(frozen=True, slots=True)
class TokenFormat:
    """Storage format of a tier: a codec for keys and one for values.

    Attributes:
        key: Codec of keys.
        value: Codec of values.
        block: Tokens encoded together.
        parts: Bytes of every part of one block: the key's, then the value's.
        value_parts: Which of the parts decode to the value: its own, or the key's.
        nbytes: Bytes of one block, metadata included.
    """

    key: Codec
    value: Codec
    block: int = field(init=False, repr=False, compare=False)
    parts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    value_parts: slice = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that both codecs have the same block."""
        if self.key.block != self.value.block:
            raise ValueError(
                f"the key codec encodes {self.key.block} tokens together and the value codec "
                f"{self.value.block}; both must be equal in a tier"
            )
        if isinstance(self.value, KeyPrefix) and self.value.key != self.key:
            raise ValueError(
                f"values are read from keys of {self.value.key!r}, but keys are stored by "
                f"{self.key!r}; both must be the same"
            )
        # Cached: read at every step of every layer.
        keys = len(self.key.parts)
        mine = slice(keys) if self.value_in_key else slice(keys, None)
        object.__setattr__(self, "value_parts", mine)
        object.__setattr__(self, "block", self.key.block)
        object.__setattr__(self, "parts", (*self.key.parts, *self.value.parts))
        object.__setattr__(self, "nbytes", sum(self.parts))

    @property
    def value_in_key(self) -> bool:
        """Whether values are the first dimensions of their keys."""
        return isinstance(self.value, KeyPrefix)

    @property
    def digest(self) -> str | None:
        """Digest of what the codecs took from a file; None: nothing."""
        each = [x.digest if isinstance(x, FittedCodec) else None for x in (self.key, self.value)]
        return None if each == [None, None] else " ".join(x or "none" for x in each)

    def values_in_keys(self, dim: int) -> "TokenFormat":
        """Return the format of keys for tokens whose value is the first `dim` dimensions of it."""
        return TokenFormat(self.key, KeyPrefix(self.key, dim))
