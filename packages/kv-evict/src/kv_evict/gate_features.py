"""What a gate reads of a token: its key before RoPE, its value, and norms of both."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_LEAST: Final = 1e-6  # added to norms before their logarithm
_SCALARS: Final = 5  # norms of key and value, their logarithms, and 1


def width(key_dim: int, value_dim: int) -> int:
    """Return F, the number of features of a token."""
    return 2 * key_dim + value_dim + _SCALARS


def features(
    key: Float[Tensor, "*S D"], pairs: Float[Tensor, "*S D"], value: Float[Tensor, "*S Dv"]
) -> Float[Tensor, "*S F"]:
    """Return the features of tokens.

    These are the key, the value, the norms of the key's pairs of dimensions, the norms of key and
    value, the logarithms of these two, and 1.

    Args:
        key: before RoPE.
        pairs: norm of the pair each of its dimensions is in.
        value: as the model computes it.
    """
    return torch.cat((key, value, pairs, scalars(key, value).mT), -1)


def scalars(key: Float[Tensor, "*S D"], value: Float[Tensor, "*S Dv"]) -> Float[Tensor, "*_ 5 L"]:
    """Return the last features of tokens, those that are not vectors, token by column."""
    norms = torch.stack([torch.linalg.vector_norm(x, dim=-1) for x in (key, value)], -2)
    one = torch.ones_like(norms[..., :1, :])
    return torch.cat((norms, (norms + _LEAST).log(), one), -2)


def split(
    features: Float[Tensor, "*S F"], key_dim: int, value_dim: int
) -> tuple[Float[Tensor, "*S D"], Float[Tensor, "*S Dv"]]:
    """Return the key before RoPE and the value of features."""
    return features[..., :key_dim], features[..., key_dim : key_dim + value_dim]
