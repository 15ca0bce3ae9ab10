"""A constant scale per channel, by which vectors are divided before quantization."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from kv_policy import CacheShape, HeadBasis, LayerBasis, Part
from kv_policy.tensor_files import Stamp, stamp
from kv_svd.file import load, load_facts
from kv_svd.fit import Moments
from kv_svd.fitted import cut, expect_file, expect_fits


@dataclass(frozen=True)
class ChannelScale(Part):
    """Divide values by a scale per channel, and multiply attention outputs by it; drop nothing.

    The scale of a channel is the square root of its root mean square on the calibration text, so
    large channels set less of the scale of a token. ZipCache takes the square root of the largest
    magnitude in the prompt; a constant needs no pass over it, and a token's bytes do not depend on
    others. `keys` divides keys after RoPE, too, and multiplies queries.
    """

    name: ClassVar[str] = "channel-scale"
    source: ClassVar[str] = (
        "the channel-separable tokenwise quantization of ZipCache, He et al., 2024, "
        "https://arxiv.org/abs/2405.14256"
    )

    file: Annotated[str, Meta(min_length=1, description="output of kv-serve calibrate zack")]
    keys: Annotated[bool, Meta(description="scale keys too, and queries by the inverse")] = False

    def __post_init__(self) -> None:
        """Check the parameters and that the file exists.

        Raises:
            NotCalibratedError: the file does not exist.
            ValueError: a parameter is refused, or the file is damaged or has another format.
        """
        super().__post_init__()
        expect_file(self.name, self.file)

    @property
    def basis(self) -> "ChannelScale":
        """This policy."""
        return self

    @property
    def keeps_shape(self) -> bool:
        """Scales keep all dimensions."""
        return True

    @property
    def fitted_to(self) -> str:
        """Fingerprint of the calibrated model."""
        return load_facts(Path(self.file)).fingerprint

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        """Return the maps of one layer, restricted to the heads of `shape`.

        Raises:
            ValueError: layers, heads or dimensions differ from the calibrated model.
        """
        expect_fits(self.name, self.file, load_facts(Path(self.file)), layer, shape)
        key, value = _scales(stamp(Path(self.file)))[layer]
        here = slice(shape.first_head, shape.first_head + shape.kv_heads)
        scaled = cut(key, here, self.name) if self.keys else None
        return LayerBasis(scaled, cut(value, here, self.name))


@lru_cache(maxsize=4)
def _scales(file: Stamp) -> tuple[tuple[HeadBasis, HeadBasis], ...]:
    """Return the maps of all layers for all heads; cached, as many caches share a policy."""
    return tuple((_of(layer.keys), _of(layer.values)) for layer in load(file.path)[1])


def _of(stored: Moments) -> HeadBasis:
    """Return diagonal maps; a channel that is always 0 stays as it is."""
    mean = stored.total.diagonal(dim1=1, dim2=2) / stored.rows
    scale = mean.where(mean > 0, 1.0) ** 0.25
    heads, dim = scale.shape
    down, up = (torch.diag_embed(each).float() for each in (1 / scale, scale))
    return HeadBasis(down, (dim,) * heads, up)
