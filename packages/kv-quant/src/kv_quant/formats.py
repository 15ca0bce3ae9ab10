"""The formats by name: keys and values in 8, 4, 3, 2 or 1 bits each, or in floating point."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

import torch
from msgspec import Meta

from kv_policy import (
    CacheShape,
    Capabilities,
    Codec,
    Formats,
    NotCalibratedError,
    Part,
    TokenFormat,
    Uncompressed,
)
from kv_quant.block_float import WIDTHS, BlockFloatCodec
from kv_quant.blocks import ChannelCodec, RowsCodec
from kv_quant.codebook import LEVELS, CodebookCodec
from kv_quant.fitted import LevelsCodec
from kv_quant.integer import IntegerCodec
from kv_quant.level_file import Fit, FittedLevels, load
from kv_quant.outliers import OutlierCodec

BLOCK: Final = 32  # the group of tokens in KIVI


@dataclass(frozen=True)
class IntegerFormat(Part):
    """Base of formats that store keys and values as integers, each with its own number of bits.

    Every token of every KV head is encoded independently, with its own scale and zero, so tokens
    can be stored, moved and dropped one by one. With `keys=channel` this holds for values only;
    keys stay raw until a block is complete, and have a scale and a zero per channel of the block,
    as in KIVI (Liu et al., 2024, https://arxiv.org/abs/2402.02750). With `levels=normal` codes
    stand for the levels of a codebook for rotated coordinates, and a vector has its norm in place
    of a scale and a zero, as in TurboQuant (Zandieh et al., 2025, https://arxiv.org/abs/2504.19874).
    With `levels=fitted` the levels are those of `file`, fitted to a model, as in KVQuant (Hooper et
    al., 2024, https://arxiv.org/abs/2401.18079). With `levels=bfp` codes are signed mantissas that
    share a power of two, as in MX formats (Rouhani et al., 2023, https://arxiv.org/abs/2310.10537).
    With `outliers` some elements of each vector are kept apart in float16, as in KVQuant, too.
    """

    source: ClassVar[str] = (
        "LeanKV, Zhang et al., 2024, https://arxiv.org/abs/2412.03131, Eq. 2; keys=channel: KIVI, "
        "Liu et al., 2024, https://arxiv.org/abs/2402.02750; levels=normal: TurboQuant, Zandieh et "
        "al., 2025, https://arxiv.org/abs/2504.19874; levels=bfp: Microscaling, Rouhani et al., "
        "2023, https://arxiv.org/abs/2310.10537; outliers, levels=fitted: KVQuant, Hooper et al., "
        "2024, https://arxiv.org/abs/2401.18079"
    )
    variants: ClassVar[tuple[str, ...]] = ()  # not searched, unless a subclass says so
    key_bits: ClassVar[int]
    value_bits: ClassVar[int]
    tiers = 1

    group: Annotated[
        int,
        Meta(
            ge=0,
            description="elements of a vector that share a scale; 0: all; not for keys per channel",
        ),
    ] = 0
    window: Annotated[
        int, Meta(ge=0, description="recent tokens kept raw; 0: every token is encoded at once")
    ] = 0
    keys: Annotated[
        Literal["token", "channel"],
        Meta(description="what shares a scale in keys: a token's elements, or a channel's"),
    ] = "token"
    block: Annotated[
        int, Meta(ge=2, description="tokens whose keys share scales, with keys=channel")
    ] = BLOCK
    levels: Annotated[
        Literal["even", "normal", "fitted", "bfp"],
        Meta(
            description="what codes stand for: even steps, levels for rotated coordinates, levels "
            "of a file, or signed mantissas that share a power of two (block floating point)"
        ),
    ] = "even"
    outliers: Annotated[
        int,
        Meta(
            ge=0, description="elements of each vector kept apart in float16; not for keys=channel"
        ),
    ] = 0
    file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="output of kv-serve calibrate levels, for levels=fitted"),
    ] = None

    def __init_subclass__(cls, bits: tuple[int, int]) -> None:
        """Name the format after the bits of its keys and values."""
        super().__init_subclass__()
        cls.key_bits, cls.value_bits = bits
        cls.name = f"k{bits[0]}v{bits[1]}"

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            NotCalibratedError: the file does not exist.
            ValueError: a value is out of range, parameters contradict each other, or the file is
                damaged or has no levels for these outliers.
        """
        super().__post_init__()
        if self.keys == "token" and self.block != BLOCK:
            raise ValueError(
                f"{self.name}: block={self.block} is refused: keys with a scale per token have no "
                "block; remove it, or set keys=channel"
            )
        if self.outliers and self.keys == "channel":
            raise ValueError(
                f"{self.name}: outliers={self.outliers} is refused with keys=channel: they are "
                "kept apart in vectors with scales of their own; remove one of the two"
            )
        if (self.levels == "fitted") != (self.file is not None):
            raise ValueError(
                f"{self.name}: levels={self.levels} is refused with file={self.file}: fitted "
                "levels are in a file, and others are not; set levels=fitted and file, or neither"
            )
        if self.levels in ("normal", "fitted"):
            self._expect_widths(LEVELS, "there are codebooks of 4, 3, 2 and 1 bits")
            if self.group:
                raise ValueError(
                    f"{self.name}: levels={self.levels} is refused with group={self.group}: a "
                    f"codebook has one scale per token; remove the group, or levels={self.levels}"
                )
            if self.levels == "fitted":
                _ = self._fits  # whether the file has them
        elif self.levels == "bfp":
            self._expect_widths(WIDTHS, "there are mantissas of 8, 4, 3 and 2 bits")

    def _expect_widths(self, known: Collection[int], there_are: str) -> None:
        """Check that keys and values have levels other than even steps.

        Raises:
            ValueError: their widths are not among the known ones, or keys share scales per channel.
        """
        for bits in (self.key_bits, self.value_bits):
            if bits not in known:
                raise ValueError(
                    f"{self.name}: levels={self.levels} is refused: {there_are}, and none of "
                    f"{bits}; use such a format, or levels=even"
                )
        if self.keys != "token":
            raise ValueError(
                f"{self.name}: levels={self.levels} is refused with keys={self.keys}: channels of "
                "a block have even steps; remove one of the two"
            )

    @property
    def formats(self) -> Formats:
        """This format."""
        return self

    @property
    def fitted_to(self) -> str | None:
        """Fingerprint of the model that the levels were fitted to; None: they are not fitted."""
        return None if self.levels != "fitted" else self._found.fingerprint

    @property
    def _found(self) -> FittedLevels:
        """What the file holds."""
        try:
            return load(self.name, str(self.file))
        except NotCalibratedError:
            raise
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def _fits(self) -> tuple[Fit, Fit]:
        """The levels of the file for the codes of keys, and for those of values."""
        found = self._found
        key, value = (found.of(bits, self.outliers) for bits in (self.key_bits, self.value_bits))
        if key is None or value is None:
            beside = ", ".join(map(str, found.outliers)) or "none"
            raise ValueError(
                f"{self.name}: outliers={self.outliers} is refused: {self.file} has levels of "
                f"{self.key_bits} and {self.value_bits} bits beside these numbers of outliers: "
                f"{beside}; use one of them, or calibrate with --outliers {self.outliers}"
            )
        return key, value

    @property
    def capabilities(self) -> Capabilities:
        """A raw window or a block makes a token's bytes depend on later tokens.

        A block cannot be cut either: its channel scales depend on all its tokens.
        """
        alone = self.keys == "token"
        return Capabilities(shares_prefixes=alone and self.window == 0, rolls_back=alone)

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        """Return the codecs for keys and values of this shape."""
        if self.keys == "channel":
            channels = ChannelCodec(shape.key_dim, self.key_bits, self.block)
            value = IntegerCodec(shape.value_dim, self.value_bits, self.group)
            return (TokenFormat(channels, RowsCodec(value, self.block)),)
        keys: tuple[float, ...] = ()
        values: tuple[float, ...] = ()
        if self.levels == "fitted":
            of_keys, of_values = self._fits
            keys, values = of_keys.keys, of_values.values
        key = self._codec(shape.key_dim, self.key_bits, keys)
        return (TokenFormat(key, self._codec(shape.value_dim, self.value_bits, values)),)

    def _codec(self, dim: int, bits: int, fitted: tuple[float, ...]) -> Codec:
        """Return the codec of single vectors; one element at least is no outlier."""
        each: Codec
        if self.levels == "normal":
            each = CodebookCodec(dim, bits)
        elif self.levels == "fitted":
            each = LevelsCodec(dim, bits, fitted)
        elif self.levels == "bfp":
            each = BlockFloatCodec(dim, bits, self.group)
        else:
            each = IntegerCodec(dim, bits, self.group)
        count = min(self.outliers, dim - 1)
        return OutlierCodec(each, count) if count else each


@dataclass(frozen=True)
class K8V8(IntegerFormat, bits=(8, 8)):
    """Keys in 8 bits, values in 8."""

    variants: ClassVar[tuple[str, ...]] = ("",)


@dataclass(frozen=True)
class K8V4(IntegerFormat, bits=(8, 4)):
    """Keys in 8 bits, values in 4."""

    variants: ClassVar[tuple[str, ...]] = ("",)


@dataclass(frozen=True)
class K8V3(IntegerFormat, bits=(8, 3)):
    """Keys in 8 bits, values in 3."""


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

    variants: ClassVar[tuple[str, ...]] = ("", "window=64", "keys=channel")


@dataclass(frozen=True)
class K4V3(IntegerFormat, bits=(4, 3)):
    """Keys in 4 bits, values in 3."""


@dataclass(frozen=True)
class K4V2(IntegerFormat, bits=(4, 2)):
    """Keys in 4 bits, values in 2."""

    variants: ClassVar[tuple[str, ...]] = ("window=64", "keys=channel,block=64")


@dataclass(frozen=True)
class K4V1(IntegerFormat, bits=(4, 1)):
    """Keys in 4 bits, values in 1."""


@dataclass(frozen=True)
class K3V8(IntegerFormat, bits=(3, 8)):
    """Keys in 3 bits, values in 8."""


@dataclass(frozen=True)
class K3V4(IntegerFormat, bits=(3, 4)):
    """Keys in 3 bits, values in 4."""


@dataclass(frozen=True)
class K3V3(IntegerFormat, bits=(3, 3)):
    """Keys in 3 bits, values in 3."""


@dataclass(frozen=True)
class K3V2(IntegerFormat, bits=(3, 2)):
    """Keys in 3 bits, values in 2."""


@dataclass(frozen=True)
class K3V1(IntegerFormat, bits=(3, 1)):
    """Keys in 3 bits, values in 1."""


@dataclass(frozen=True)
class K2V8(IntegerFormat, bits=(2, 8)):
    """Keys in 2 bits, values in 8."""


@dataclass(frozen=True)
class K2V4(IntegerFormat, bits=(2, 4)):
    """Keys in 2 bits, values in 4."""


@dataclass(frozen=True)
class K2V3(IntegerFormat, bits=(2, 3)):
    """Keys in 2 bits, values in 3."""


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
class K1V3(IntegerFormat, bits=(1, 3)):
    """Keys in 1 bit, values in 3."""


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
