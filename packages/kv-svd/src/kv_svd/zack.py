"""ZACK: bases shared by keys and queries, and by values and the output projection."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from kv_policy import CacheShape, HeadBasis, LayerBasis
from kv_policy.tensor_files import Stamp, checksum, stamp
from kv_svd.file import Facts, load
from kv_svd.fit import Directions, basis, rotation
from kv_svd.ranked import Ranked
from kv_svd.rates import MULTIPLE, Spectra
from kv_svd.statistics import LayerStatistics, Statistics


@dataclass(frozen=True)
class Zack(Ranked):
    """Rotate each head and keep the directions of the largest singular values.

    Keys share a rotation with the queries of their group, after RoPE: the right singular vectors of
    both stacked. Values share theirs with the slices of the output projection that multiply them.
    Attention runs in the reduced space, since (q·R)·(k·R) approximates q·k.

    A removal rate common to all heads is the share of its singular values that a head drops
    (Eq. 6), so heads whose singular values fall quickly keep fewer dimensions. `keep` selects the
    least removal that keeps at most that share of the whole cache, and `rate` is its complement.
    Without both, the rate is the one that the search of `kv-serve calibrate zack --max-loss` wrote
    into the file, with adaptive ranks in multiples of 16.
    """

    name: ClassVar[str] = "zack"
    source: ClassVar[str] = "ZACK, Zhang et al., 2024, https://arxiv.org/abs/2408.04107"

    def directions(self, layer: LayerStatistics) -> tuple[Directions, Directions]:
        """Return the right singular vectors of queries and keys, and of values and projection."""
        return rotation(layer.query + layer.keys), rotation(layer.values + layer.output)

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        """Return the maps of one layer; values are truncated if the model's weights rotate them.

        Raises:
            ValueError: see the base class, or the weights have the value basis of another file.
        """
        found = super().bind(layer, shape)
        if shape.folded is None or found.value is None:
            return found
        if shape.folded != self.value_fingerprint:
            raise ValueError(
                f"zack: this model's weights hold the value basis {shape.folded}, but that of "
                f"{self.file} is {self.value_fingerprint}; use the file that the model was folded "
                "with, or the model as it was before"
            )
        return LayerBasis(found.key, HeadBasis.truncating(shape.value_dim, found.value.rank))

    @property
    def value_fingerprint(self) -> str:
        """Fingerprint of the value moments, which determine the rotations; not of the ranks."""
        return _fingerprint(stamp(self.path))

    def value_rotation(self, layer: int) -> HeadBasis:
        """Return all right singular vectors of a layer's values; see `kv_policy.FoldsValues`."""
        _, found = self.directions(load(self.path)[1].layers[layer])
        heads, dim, _ = found.matrix.shape
        return basis(found, torch.full((heads,), dim), torch.float64)

    def spectra(self, statistics: Statistics) -> Spectra:
        """Return the singular values of both pairs, as stored in the file."""
        return statistics.key, statistics.value

    def found_rate(self, facts: Facts) -> float:
        """Return the rate found by calibration, which holds for its kind of ranks only.

        Raises:
            ValueError: the file has no rate, or `ranks` or `multiple` differ from those of the
                search.
        """
        if facts.rate is None:
            raise ValueError(
                f"zack: {self.file} has no rate, since none was searched for; use keep=70% or "
                "another share of the dimensions, or calibrate with --max-loss"
            )
        if self.ranks == "uniform":
            raise ValueError(
                f"zack: the rate {facts.rate} in {self.file} was found with adaptive ranks; with "
                "ranks=uniform use keep=..., the share of the dimensions"
            )
        if self.multiple != MULTIPLE:
            raise ValueError(
                f"zack: the rate {facts.rate} in {self.file} was found with ranks that are "
                f"multiples of {MULTIPLE}; with multiple={self.multiple} use keep=..."
            )
        return facts.rate


@lru_cache(maxsize=4)
def _fingerprint(file: Stamp) -> str:
    layers = load(file.path)[1]
    moments = torch.stack([(layer.values + layer.output).total for layer in layers])
    return checksum({"values and output": moments})[:16]
