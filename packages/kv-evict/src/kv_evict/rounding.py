"""Rounding to few bits, so that values equal up to float32 rounding become equal."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_BITS: Final = 12  # float32 rounding differences are in lower bits


def rounded(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Round numbers to 12 bits, so that a batch and a single row give equal results."""
    mantissa, exponent = torch.frexp(x)
    near: Tensor = torch.ldexp((mantissa * 2**_BITS).round(), exponent - _BITS)
    return near
