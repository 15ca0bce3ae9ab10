"""How far errors in keys and values move the outputs of attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_QUERIES: Final = 256  # whose attention is computed at once


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Squared change of a layer's outputs per squared error, summed over queries and dimensions.

    Attributes:
        key: of each element of a key.
        value: of each element of a value; it is the same for all elements of one.
        output: the sum of the squared outputs.
    """

    key: Float[Tensor, "B H L D"]
    value: Float[Tensor, "B H L"]
    output: float


def sensitivity(
    query: Float[Tensor, "B H G L D"],
    key: Float[Tensor, "B H L D"],
    value: Float[Tensor, "B H L Dv"],
) -> Sensitivity:
    """Return the squared derivatives of causal attention's outputs by each element.

    With a the attention of query q to token t, and o its output, an error in element d of the
    value v of t moves o by a times the error, and one in element d of its key moves o by
    a * q_d / sqrt(D) * (v - o) times the error, to first order.

    Args:
        query: after RoPE, scaled so that q·k / sqrt(D) is the logit.
        key: of the same tokens.
        value: of the same tokens.
    """
    of_key, of_value, output = torch.zeros_like(key), torch.zeros_like(key[..., 0]), 0.0
    norm = value.square().sum(-1)[:, :, None, None]
    for q, a, o in _attention(query, key, value):
        seen, weight = a.shape[-1], a.square()
        v = value[:, :, None, :seen]
        far = norm[..., :seen] + o.square().sum(-1, keepdim=True) - 2 * (o @ v.mT)  # |v - o|^2
        moved = weight * far.clamp(min=0) / key.shape[-1]
        of_key[:, :, :seen] += moved.flatten(2, 3).mT @ q.square().flatten(2, 3)
        of_value[:, :, :seen] += weight.sum((2, 3))
        output += float(o.double().square().sum())
    return Sensitivity(of_key, of_value, output)


def _attention(
    query: Float[Tensor, "B H G L D"],
    key: Float[Tensor, "B H L D"],
    value: Float[Tensor, "B H L Dv"],
) -> Iterator[
    tuple[Float[Tensor, "B H G Q D"], Float[Tensor, "B H G Q T"], Float[Tensor, "B H G Q Dv"]]
]:
    """Yield some queries, their attention to all tokens up to the last of them, and outputs."""
    length, scale = key.shape[2], key.shape[-1] ** -0.5
    place = torch.arange(length, device=key.device)
    for first in range(0, length, _QUERIES):
        last = min(length, first + _QUERIES)
        q = query[:, :, :, first:last]
        logit = q @ key[:, :, None, :last].mT * scale
        later = place[:last] > place[first:last, None]
        a = logit.masked_fill(later, -torch.inf).softmax(-1)
        yield q, a, a @ value[:, :, None, :last]
