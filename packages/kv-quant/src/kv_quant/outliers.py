"""Outliers of each vector kept apart, so that the scale of the others is smaller."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Float32, Int, UInt8
from torch import Tensor

from kv_policy import Codec, FittedCodec
from kv_quant.affine import clean, expect_rows, expect_vectors

NARROW = 256  # dimensions whose index is one byte


@dataclass(frozen=True, slots=True)
class OutlierCodec:
    """Vectors with `count` elements in float16, and the others by another codec.

    The elements are the smallest and the largest ones whose removal leaves the least range; of two
    ranges that are equal, the one with more large elements removed. The other codec encodes the
    vector clamped to that range, so it does not depend on them, and they replace what it decodes.
    After its parts a vector has the indices of the outliers, from the smallest element to the
    largest (the low bytes of all and, with more than 256 dimensions, the high ones), and then their
    float16 values.

    Elements beyond +-32752 are stored as such, NaN as 0, as in `IntegerCodec`.

    Source: Hooper et al., 2024, KVQuant (https://arxiv.org/abs/2401.18079), section 3.4, with the
    same number of outliers in every vector in place of thresholds, so that all have as many bytes.

    Args:
        each: codec of the other elements, which encodes every token independently.
        count: outliers of a vector, at least 1 and fewer than its elements.
    """

    each: Codec
    count: int
    block = 1  # every token is encoded independently

    def __post_init__(self) -> None:
        """Check the codec and the count.

        Raises:
            ValueError: the codec encodes tokens together, or `count` is not supported.
        """
        if self.each.block != 1:
            raise ValueError(
                f"{self.each!r} encodes {self.each.block} tokens together; outliers are kept apart "
                "in codecs that encode every token independently"
            )
        if not 1 <= self.count < self.dim:
            raise ValueError(
                f"count is {self.count}; keep at least 1 outlier of a vector apart, and fewer than "
                f"its {self.dim} elements"
            )

    @property
    def dim(self) -> int:
        """D, elements of a vector."""
        return self.each.dim

    @property
    def digest(self) -> str | None:
        """Digest of what the other codec took from a file; None: nothing."""
        return self.each.digest if isinstance(self.each, FittedCodec) else None

    @property
    def layout(self) -> None:
        """None: kernels read no outliers."""
        return None

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of the parts of the other elements, of indices, and of values."""
        return (*self.each.parts, self.count * (1 if self.dim <= NARROW else 2), 2 * self.count)

    def encode(self, x: Float[Tensor, "n 1 D"]) -> UInt8[Tensor, "n N"]:
        """Encode vectors into the bytes of the other codec, indices and values.

        Raises:
            ValueError: the vectors do not have `dim` elements.
        """
        expect_vectors(x, self.dim)
        inner, index, value = self.split(clean(x[:, 0]))
        width = self.parts[-2] // self.count
        places = [((index >> (8 * i)) & 255).to(torch.uint8) for i in range(width)]
        return torch.cat([self.each.encode(inner[:, None]), *places, value.view(torch.uint8)], 1)

    def decode(self, data: UInt8[Tensor, "n N"]) -> Float32[Tensor, "n 1 D"]:
        """Decode bytes into float32 vectors, with the outliers in place.

        Raises:
            ValueError: the rows do not have `sum(parts)` bytes.
        """
        expect_rows(data, sum(self.parts))
        split = sum(self.each.parts)
        inner, places, kept = data.split([split, *self.parts[-2:]], dim=1)
        value = kept.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
        low, *high = places.long().split(self.count, dim=1)
        index = low if not high else low + (high[0] << 8)
        index = index.clamp_(max=self.dim - 1)  # empty slots of a page hold any bytes
        found = self.each.decode(inner).float()[:, 0].scatter(1, index, value)
        return found[:, None]

    def bound(self, x: Float[Tensor, "n 1 D"]) -> Float[Tensor, "n 1 D"]:
        """Return the other codec's bound, and of outliers their rounding to float16.

        What is clipped is added, which is infinite for an infinity or a NaN.
        """
        given = x[:, 0]
        whole = clean(given)
        inner, index, value = self.split(whole)
        inside = self.each.bound(inner[:, None])[:, 0].double()
        rounded = (whole.gather(1, index).double() - value.double()).abs()
        clipped = (given.double() - whole).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        return (inside.scatter(1, index, rounded) + clipped)[:, None]

    def split(
        self, x: Float32[Tensor, "n D"]
    ) -> tuple[Float32[Tensor, "n D"], Int[Tensor, "n count"], Float16[Tensor, "n count"]]:
        """Return the vectors clamped to the others, and the indices and values of the outliers."""
        ordered, order = x.sort(dim=1, stable=True)  # equal elements by dimension, on any device
        rest = self.dim - self.count
        low, high = ordered[:, : self.count + 1], ordered[:, rest - 1 :]
        small = (high - low).argmin(dim=1, keepdim=True)  # how many outliers are the smallest
        place = torch.arange(self.count, device=x.device).expand(len(x), -1)
        place = place + rest * (place >= small)
        inner = x.clamp(low.gather(1, small), high.gather(1, small))
        return inner, order.gather(1, place), ordered.gather(1, place).half()
