"""Plain SVD of keys and of values, ignoring queries and the output projection."""

from dataclasses import dataclass
from typing import ClassVar

from kv_svd.fit import Directions, rotation
from kv_svd.ranked import Ranked
from kv_svd.statistics import LayerStatistics


@dataclass(frozen=True)
class SvdKV(Ranked):
    """Keep the directions in which keys, and values, are largest: an SVD of each alone.

    Unlike `zack` it ignores queries: a direction with large keys is kept even if no query has a
    component in it.
    """

    name: ClassVar[str] = "svd-kv"
    source: ClassVar[str] = (
        "the SVD of K and of V that ZACK compares itself with, Zhang et al., 2024, "
        "https://arxiv.org/abs/2408.04107"
    )

    def directions(self, layer: LayerStatistics) -> tuple[Directions, Directions]:
        """Return the right singular vectors of keys, and of values."""
        return rotation(layer.keys), rotation(layer.values)
