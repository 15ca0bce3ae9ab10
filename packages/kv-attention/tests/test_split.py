"""The error of three TF32 products compared with a float32 product, computed without a GPU.

A tensor core multiplies numbers of 11 significant bits exactly and adds in float32. Triton's
`tf32x3` splits each number into two of them and omits the product of the smaller halves.
"""

import pytest
import torch
from torch import Tensor

LOWEST = ~0x1FFF  # TF32 keeps 10 of the 23 stored bits of a float32


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first 11 significant bits of each number, and the next 11."""
    first = (x.view(torch.int32) & LOWEST).view(torch.float32)
    rest = x - first
    return first, (rest.view(torch.int32) & LOWEST).view(torch.float32)


@pytest.mark.parametrize("dim", [5, 64, 128, 256])
def test_little_is_left_out(dim: int) -> None:
    """Less than 2**-20 of each factor is in neither half; the omitted product is smaller."""
    generator = torch.Generator().manual_seed(dim)
    q, key = (torch.randn(64, dim, generator=generator) for _ in range(2))
    (first, second), (other_first, other_second) = halves(q), halves(key)
    split = first @ other_second.T + second @ other_first.T + first @ other_first.T
    exact = q.double() @ key.double().T
    size = q.double().abs() @ key.double().abs().T
    left_out = ((split - exact).abs() / size).max()
    assert left_out < 3 * 2**-20
    assert ((first @ other_first.T - exact).abs() / size).max() > 100 * left_out
