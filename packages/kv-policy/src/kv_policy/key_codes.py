"""Codes of keys by which pages may be ranked: 2 bits per dimension of a rotated key, and a scale.

After a rotation that spreads a vector over all coordinates, these are nearly independent normal
numbers of one variance. An element x of a rotated key has the code floor(x / r + 2), from 0 to 3,
where r is the root mean square of the elements. A code c stands for 2 c - 3, times a scale. With
the scale <x, x> / <x, 2 c - 3> the error of a product with the key itself is 0.

Source: the rotation and few bits per coordinate of TurboQuant (Zandieh et al., 2025,
https://arxiv.org/abs/2504.19874); the scale of RaBitQ (Gao and Long, 2024,
https://arxiv.org/abs/2405.12497).
"""

from functools import lru_cache
from typing import Final

import torch
from jaxtyping import Float32
from torch import Tensor

from kv_policy.orthogonal import spreading

BITS: Final = 2
DIMS: Final = 16  # of a key that share four bytes
LEVELS: Final = 2**BITS
MOST_CODED_DIM: Final = 512  # of keys that Triton's kernels encode


def code_rows(dim: int) -> int:
    """Return how many rows of codes a page has: each has `DIMS` dimensions of all of its keys."""
    return -(-dim // DIMS)


def code_bytes(dim: int, tokens: int) -> int:
    """Return the bytes of the codes of a page.

    First there are its rows of codes. A row has four bytes per token, and bits 2 p and 2 p + 1 of
    byte j are the code of dimension 4 p + j of the row's. Codes past the last dimension are 0. Then
    there is a float16 scale per token.
    """
    return tokens * (4 * code_rows(dim) + 2)


@lru_cache(maxsize=64)
def code_rotation(dim: int, device: torch.device) -> Float32[Tensor, "D D"]:
    """Return the matrix that keys and queries are multiplied by, as rows: orthogonal and dense.

    Signs of the dimensions come first, so that it does not undo a rotation by the matrix without
    them, which stored keys may have.
    """
    # Cached tensors outlive the caller, and vLLM changes torch's default device meanwhile.
    with torch.inference_mode(False), torch.device("cpu"):
        sign = torch.tensor([1.0 - 2.0 * (_mixed(d + 1) & 1) for d in range(dim)])
        return (sign[:, None] * spreading(dim)).float().to(device)


def _mixed(x: int) -> int:
    """Mix the bits of a number; each of the result depends on all of them (MurmurHash3)."""
    for shift, factor in ((0, 0x9E3779B1), (16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift if shift else x) * factor & 0xFFFFFFFF
    return x ^ x >> 16
