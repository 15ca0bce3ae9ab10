"""Bases with singular values."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Spectral(Protocol):
    """A basis whose directions have singular values, for plots of the spectrum."""

    def singular_values(self) -> Mapping[str, Float[Tensor, "N H D"]]:
        """Return the values by the name of the vectors, descending per layer and stored head.

        Ranks are chosen from them, so two bases that differ only in rank return equal values under
        equal names.
        """
        ...
