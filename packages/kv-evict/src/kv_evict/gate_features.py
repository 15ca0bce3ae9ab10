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
    return torch.cat((key, value, pairs, _scalars(key, value)), -1)


def products(
    weight: Float[Tensor, "*#S F"],
    turned: Float[Tensor, "*#S D"],
    key: Float[Tensor, "*S D"],
    pairs: Float[Tensor, "*S D"],
    value: Float[Tensor, "*S Dv"],
) -> Float[Tensor, "*S"]:
    """Return weight · features for keys after RoPE.

    The weights of the key are rotated instead of the key: the product of two vectors that are
    rotated alike does not change, and neither does a norm.

    Args:
        weight: of each feature.
        turned: the first D weights, rotated as the keys are.
        key: after RoPE.
        pairs: norm of the pair each of its dimensions is in.
        value: as the model computes it.
    """
    dim = key.shape[-1]
    sizes = (dim, value.shape[-1], dim, _SCALARS)
    _, of_value, of_pairs, of_scalars = weight.split(sizes, -1)
    found: Tensor = (key * turned).sum(-1) + (value * of_value).sum(-1) + (pairs * of_pairs).sum(-1)
    found += (_scalars(key, value) * of_scalars).sum(-1)
    return found


def _scalars(key: Float[Tensor, "*S D"], value: Float[Tensor, "*S Dv"]) -> Float[Tensor, "*S 5"]:
    both = torch.stack([torch.linalg.vector_norm(x, dim=-1) for x in (key, value)], -1)
    return torch.cat((both, (both + _LEAST).log(), torch.ones_like(both[..., :1])), -1)
