"""Keys and values each in a basis of their own, without regard to what meets them."""

from dataclasses import dataclass
from typing import ClassVar

from kv_svd.fit import Directions, rotation
from kv_svd.ranked import Ranked
from kv_svd.statistics import LayerStatistics


@dataclass(frozen=True)
class SvdKV(Ranked):
    """Keep the directions in which keys, and values, are largest: an SVD of each alone.

    What it lacks beside `zack` is the pairing: a direction in which keys are large is kept though
    no query ever looks there.
    """

    name: ClassVar[str] = "svd-kv"
    source: ClassVar[str] = (
        "the SVD of K and of V that ZACK compares itself with, Zhang et al., 2024, "
        "https://arxiv.org/abs/2408.04107"
    )

    def directions(self, layer: LayerStatistics) -> tuple[Directions, Directions]:
        """The right singular vectors of keys, and of values."""
        return rotation(layer.keys), rotation(layer.values)
