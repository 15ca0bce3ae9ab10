"""ZACK: keys in a basis they share with their queries, values with the projection behind them."""

from dataclasses import dataclass
from typing import ClassVar

from kv_svd.file import Facts
from kv_svd.fit import Directions, rotation
from kv_svd.ranked import Ranked
from kv_svd.rates import MULTIPLE, Spectra
from kv_svd.statistics import LayerStatistics, Statistics


@dataclass(frozen=True)
class Zack(Ranked):
    """Rotate each head and keep the directions of the largest singular values.

    Keys share a rotation with the queries of their group, after RoPE: the right singular vectors of
    both stacked. Values share theirs with the slices of the output projection that read them.
    Attention runs in the reduced space, since q·R times k·R stands for q·k.

    One removal rate for all heads says what share of its singular values a head may lose (Eq. 6),
    so heads whose values fall fast keep fewer dimensions. `keep` asks for the least removal that
    leaves no more than that share of the whole cache, and `rate` says the same by what is removed.
    With neither, it is the rate that the search of `kv-serve calibrate zack --max-loss` wrote into
    the file, which found it with adaptive ranks in multiples of 16.
    """

    name: ClassVar[str] = "zack"
    source: ClassVar[str] = "ZACK, Zhang et al., 2024, https://arxiv.org/abs/2408.04107"

    def directions(self, layer: LayerStatistics) -> tuple[Directions, Directions]:
        """The right singular vectors of queries and keys, and of values and the projection."""
        return rotation(layer.query + layer.keys), rotation(layer.values + layer.output)

    def spectra(self, statistics: Statistics) -> Spectra:
        """Singular values of both pairs, as the file has them."""
        return statistics.key, statistics.value

    def found_rate(self, facts: Facts) -> float:
        """The rate that calibration found, with the ranks it was found for.

        Raises:
            ValueError: no rate was searched for, or ranks are to be alike, or multiples of another
                number than those it was found with.
        """
        if facts.rate is None:
            raise ValueError(
                f"zack: {self.file} names no rate, since none was searched for; give keep=70% or "
                "another share of the dimensions, or calibrate with --max-loss"
            )
        if self.ranks == "uniform":
            raise ValueError(
                f"zack: the rate {facts.rate} in {self.file} was found with adaptive ranks; with "
                "ranks=uniform say keep=..., the share of the dimensions"
            )
        if self.multiple != MULTIPLE:
            raise ValueError(
                f"zack: the rate {facts.rate} in {self.file} was found with ranks that are "
                f"multiples of {MULTIPLE}; with multiple={self.multiple} say keep=..."
            )
        return facts.rate
