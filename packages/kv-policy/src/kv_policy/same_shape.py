"""Bases whose coordinates have the shape of the vectors."""

from typing import Protocol, runtime_checkable

from kv_policy.contract import Basis


@runtime_checkable
class SameShape(Protocol):
    """A basis that may keep all dimensions of every head, such as a rotation."""

    @property
    def keeps_shape(self) -> bool:
        """Whether each KV head stores as many coordinates as its vectors have dimensions.

        Then a token's bytes are those of its format without a basis, and hosts can store it in the
        same place.
        """
        ...


def keeps_shape(basis: Basis | None) -> bool:
    """Return whether stored vectors have the model's shape: there is no basis, or it says so."""
    return basis is None or (isinstance(basis, SameShape) and basis.keeps_shape)
