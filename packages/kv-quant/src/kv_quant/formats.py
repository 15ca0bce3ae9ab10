"""The formats by name: keys and values as integers of 8, 4, 2 or 1 bits each, or as they are."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from kv_policy import CacheShape, Capabilities, Formats, Part, TokenFormat, Uncompressed
from kv_quant.integer import IntegerCodec


@dataclass(frozen=True)
class IntegerFormat(Part):
    """Base of formats that store a key and a value as integers, each with its own number of bits.

    Every token of every KV head stands alone, with its scale and zero beside it, so tokens may be
    stored, moved and dropped one by one.
    """

    source: ClassVar[str] = "LeanKV, Zhang et al., 2024, https://arxiv.org/abs/2412.03131, Eq. 2"
    key_bits: ClassVar[int]
    value_bits: ClassVar[int]

    group: Annotated[
        int, Meta(ge=0, description="elements that share a scale; 0: the whole vector")
    ] = 0
    window: Annotated[
        int, Meta(ge=0, description="recent tokens kept raw; 0: every token is encoded at once")
    ] = 0

    def __init_subclass__(cls, bits: tuple[int, int]) -> None:
        """Name the format after the bits of its keys and values."""
        super().__init_subclass__()
        cls.key_bits, cls.value_bits = bits
        cls.name = f"k{bits[0]}v{bits[1]}"

    @property
    def formats(self) -> Formats:
        """This format."""
        return self

    @property
    def capabilities(self) -> Capabilities:
        """A raw window makes a token's bytes depend on whether enough others came after it."""
        return Capabilities(shares_prefixes=self.window == 0)

    @property
    def tiers(self) -> int:
        """Every token is stored alike."""
        return 1

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        """Give the codecs for keys and values of this shape."""
        key = IntegerCodec(shape.key_dim, self.key_bits, self.group)
        value = IntegerCodec(shape.value_dim, self.value_bits, self.group)
        return (TokenFormat(key, value),)


@dataclass(frozen=True)
class K8V8(IntegerFormat, bits=(8, 8)):
    """Keys in 8 bits, values in 8."""


@dataclass(frozen=True)
class K8V4(IntegerFormat, bits=(8, 4)):
    """Keys in 8 bits, values in 4."""


@dataclass(frozen=True)
class K8V2(IntegerFormat, bits=(8, 2)):
    """Keys in 8 bits, values in 2."""


@dataclass(frozen=True)
class K8V1(IntegerFormat, bits=(8, 1)):
    """Keys in 8 bits, values in 1."""


@dataclass(frozen=True)
class K4V8(IntegerFormat, bits=(4, 8)):
    """Keys in 4 bits, values in 8."""


@dataclass(frozen=True)
class K4V4(IntegerFormat, bits=(4, 4)):
    """Keys in 4 bits, values in 4."""


@dataclass(frozen=True)
class K4V2(IntegerFormat, bits=(4, 2)):
    """Keys in 4 bits, values in 2."""


@dataclass(frozen=True)
class K4V1(IntegerFormat, bits=(4, 1)):
    """Keys in 4 bits, values in 1."""


@dataclass(frozen=True)
class K2V8(IntegerFormat, bits=(2, 8)):
    """Keys in 2 bits, values in 8."""


@dataclass(frozen=True)
class K2V4(IntegerFormat, bits=(2, 4)):
    """Keys in 2 bits, values in 4."""


@dataclass(frozen=True)
class K2V2(IntegerFormat, bits=(2, 2)):
    """Keys in 2 bits, values in 2."""


@dataclass(frozen=True)
class K2V1(IntegerFormat, bits=(2, 1)):
    """Keys in 2 bits, values in 1."""


@dataclass(frozen=True)
class K1V8(IntegerFormat, bits=(1, 8)):
    """Keys in 1 bit, values in 8."""


@dataclass(frozen=True)
class K1V4(IntegerFormat, bits=(1, 4)):
    """Keys in 1 bit, values in 4."""


@dataclass(frozen=True)
class K1V2(IntegerFormat, bits=(1, 2)):
    """Keys in 1 bit, values in 2."""


@dataclass(frozen=True)
class K1V1(IntegerFormat, bits=(1, 1)):
    """Keys in 1 bit, values in 1."""


@dataclass(frozen=True)
class BF16(Uncompressed):
    """Keys and values in bfloat16: 8 significant bits, the range of float32."""

    name: ClassVar[str] = "bf16"
    source: ClassVar[str] = "no compression, stored in bfloat16"
    dtype: ClassVar[torch.dtype | None] = torch.bfloat16


@dataclass(frozen=True)
class FP16(Uncompressed):
    """Keys and values in float16: 11 significant bits, up to 65,504."""

    name: ClassVar[str] = "fp16"
    source: ClassVar[str] = "no compression, stored in float16"
    dtype: ClassVar[torch.dtype | None] = torch.float16


@dataclass(frozen=True)
class FP32(Uncompressed):
    """Keys and values in float32: the identity for every model in half precision."""

    name: ClassVar[str] = "fp32"
    source: ClassVar[str] = "no compression, stored in float32"
    dtype: ClassVar[torch.dtype | None] = torch.float32
