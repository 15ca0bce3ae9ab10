"""Rotation of every head by one fixed matrix, which spreads outliers before quantization."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float64
from msgspec import Meta
from torch import Tensor

from kv_policy import CacheShape, HeadBasis, LayerBasis, Part
from kv_policy.orthogonal import spreading
from kv_policy.tensor_files import Stamp, stamp
from kv_svd.file import Facts, load, load_facts
from kv_svd.fit import Moments
from kv_svd.fitted import cut, expect_file, expect_fits
from kv_svd.kq_svd import best_pair
from kv_svd.statistics import LayerStatistics


@dataclass(frozen=True)
class Hadamard(Part):
    """Rotate keys after RoPE, with queries, and values by an orthogonal matrix; drop nothing.

    Each coordinate is a mean of all dimensions, so a channel of outliers no longer sets the scale
    of a token. The matrix is the same for all heads, and needs no calibration: a Hadamard matrix,
    or the densest one of the head's width (`kv_policy.orthogonal`). Random signs, as in QuaRot,
    hardly change the error, so there are none.

    With a file, the mean key of each head is subtracted first. This changes all logits of a query
    by the same number, to which softmax is invariant. `pair` maps keys and queries, and values and
    the output projection, by the pair of `kq-svd` at full rank before the rotation.
    """

    name: ClassVar[str] = "hadamard"
    source: ClassVar[str] = (
        "QuaRot, Ashkboos et al., 2024, https://arxiv.org/abs/2404.00456; pair=true: KQ-SVD, "
        "Lesens et al., 2025, https://arxiv.org/abs/2512.05916"
    )

    file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="output of kv-serve calibrate zack, whose mean keys are subtracted"),
    ] = None
    pair: Annotated[
        bool, Meta(description="map keys with queries, and values, by kq-svd's pair first")
    ] = False

    def __post_init__(self) -> None:
        """Check the parameters, and that the file exists if there is one.

        Raises:
            NotCalibratedError: the file does not exist.
            ValueError: a parameter is refused, the file is damaged or has another format, or `pair`
                is set without a file.
        """
        super().__post_init__()
        if self.file is not None:
            expect_file(self.name, self.file)
        elif self.pair:
            raise ValueError(
                "hadamard: pair=true needs a model's statistics; add file=..., the output of "
                "kv-serve calibrate zack"
            )

    @property
    def basis(self) -> "Hadamard":
        """This policy."""
        return self

    @property
    def keeps_shape(self) -> bool:
        """A rotation keeps all dimensions."""
        return True

    @property
    def fitted_to(self) -> str | None:
        """Fingerprint of the calibrated model; None without a file."""
        facts = self._facts
        return None if facts is None else facts.fingerprint

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        """Return the maps of one layer, restricted to the heads of `shape`.

        Raises:
            ValueError: layers, heads or dimensions differ from the calibrated model, or the file
                was written without mean keys.
        """
        if self.file is None:
            heads = shape.kv_heads
            return LayerBasis(
                rotation_of(shape.key_dim, heads), rotation_of(shape.value_dim, heads)
            )
        expect_fits(self.name, self.file, load_facts(Path(self.file)), layer, shape)
        key, value = _found(self, stamp(Path(self.file)))[layer]
        here = slice(shape.first_head, shape.first_head + shape.kv_heads)
        return LayerBasis(cut(key, here, self.name), cut(value, here, self.name))

    @property
    def _facts(self) -> Facts | None:
        return None if self.file is None else load_facts(Path(self.file))


@lru_cache(maxsize=32)
def rotation_of(dim: int, heads: int) -> HeadBasis:
    """Return the rotation of heads of `dim` dimensions, the same for all."""
    return HeadBasis(spreading(dim).float().expand(heads, -1, -1), (dim,) * heads)


@lru_cache(maxsize=4)
def _found(policy: Hadamard, file: Stamp) -> tuple[tuple[HeadBasis, HeadBasis], ...]:
    """Return the maps of all layers for all heads; cached, as many caches share a policy."""
    facts, statistics = load(file.path)
    maps = []
    for layer in statistics:
        if layer.key_sum is None:
            raise ValueError(
                f"{policy.name}: {policy.file} was written without mean keys; calibrate again"
            )
        mean = layer.key_sum / facts.tokens
        if policy.pair:
            maps.append(_pair(layer, mean))
        else:
            key = rotation_of(facts.key_dim, facts.heads)
            shifted = HeadBasis(key.matrix, key.rank, shift=mean.float())
            maps.append((shifted, rotation_of(facts.value_dim, facts.heads)))
    return tuple(maps)


def _pair(layer: LayerStatistics, mean: Float64[Tensor, "H D"]) -> tuple[HeadBasis, HeadBasis]:
    """Return kq-svd's maps of centred keys and of values, each followed by the rotation."""
    keys = layer.keys
    centred = Moments(keys.total - keys.rows * mean[:, :, None] * mean[:, None], keys.rows)

    def spread(asking: Moments, stored: Moments, shift: Tensor | None) -> HeadBasis:
        found = best_pair(asking, stored)
        heads, dim, _ = found.matrix.shape
        turn = spreading(dim)
        assert found.dual is not None, "a pair has two maps"
        maps = (x @ turn for x in (found.matrix, found.dual))
        matrix, dual = (x.to(torch.float32) for x in maps)
        return HeadBasis(matrix, (dim,) * heads, dual, shift=shift)

    return (
        spread(layer.query, centred, mean.float()),
        spread(layer.output, layer.values, None),
    )
