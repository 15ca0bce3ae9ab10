"""Numbers to few bits, so that what is equal but for rounding is equal."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_BITS: Final = 12  # rounding of float32 is seen in later ones


def rounded(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Round numbers to 12 bits: what a batch and a row alone compute differently is then equal."""
    mantissa, exponent = torch.frexp(x)
    near: Tensor = torch.ldexp((mantissa * 2**_BITS).round(), exponent - _BITS)
    return near
