"""A basis that says how much each of its directions weighs."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Spectral(Protocol):
    """A basis whose directions have singular values, for people who look at how fast they fall."""

    def singular_values(self) -> Mapping[str, Float[Tensor, "N H D"]]:
        """Give them by what they are of, for each layer and stored head the greatest first.

        Ranks follow from them, so two bases that differ in nothing but ranks give equal ones under
        equal names.
        """
        ...
