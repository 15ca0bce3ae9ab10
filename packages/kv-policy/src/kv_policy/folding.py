"""Bases whose value maps can be in a model's weights."""

from typing import Protocol, runtime_checkable

from kv_policy.basis import HeadBasis
from kv_policy.contract import Basis


@runtime_checkable
class FoldsValues(Basis, Protocol):
    """A basis that truncates a rotation of values, which does not depend on the ranks.

    A model whose weights have the rotation computes values whose first dimensions are the stored
    ones. `CacheShape.folded` is then the fingerprint, with which `bind` returns value maps that
    truncate, and it raises for any other fingerprint.
    """

    @property
    def value_fingerprint(self) -> str:
        """16 hexadecimal digits that are equal for equal rotations of all layers."""
        ...

    def value_rotation(self, layer: int) -> HeadBasis:
        """Return the rotation of a layer's values for all heads, with all dimensions, in float64.

        Columns are in descending order of importance.
        """
        ...
