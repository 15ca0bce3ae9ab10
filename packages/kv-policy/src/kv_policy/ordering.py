"""Orders of scores, by numpy on a CPU: its sorts use vector instructions, those of torch do not."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def best(score: Float[Tensor, "*S L"], count: Int[Tensor, "*S"]) -> Bool[Tensor, "*S L"]:
    """Mark the `count` highest scores of each row; the earlier of equal scores wins.

    >>> best(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.tensor([2]))
    tensor([[False,  True,  True, False]])
    """
    if not _on_cpu(score):
        order = score.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order)
        places = torch.arange(score.shape[-1], device=score.device)
        rank.scatter_(-1, order, places.expand_as(order))
        return rank < count[..., None]
    last = (score.shape[-1] - count).clamp(0, score.shape[-1] - 1)[..., None]
    least = ascending(score).gather(-1, last)
    above, equal = score > least, score == least
    room = count[..., None] - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def ascending(score: Float[Tensor, "*S L"]) -> Float[Tensor, "*S L"]:
    """Sort each row.

    >>> ascending(torch.tensor([3.0, 1.0, 2.0]))
    tensor([1., 2., 3.])
    """
    if not _on_cpu(score):
        return score.sort(-1).values
    return torch.from_numpy(np.sort(score.detach().numpy(), axis=-1))


def ascending_order(score: Float[Tensor, "*S L"]) -> Int[Tensor, "*S L"]:
    """Return the indices that sort each row; those of equal scores ascend.

    >>> ascending_order(torch.tensor([3.0, 1.0, 3.0, 2.0]))
    tensor([1, 3, 0, 2])
    """
    if not _on_cpu(score) or score.dtype != torch.float32:
        return score.argsort(dim=-1, stable=True)
    # Integers in the order of the scores, above their indices: no two are equal.
    bits = (score.detach() + 0.0).view(torch.int32)  # 0 for -0, which is equal to it
    ordered = (bits ^ (bits >> 31 & torch.iinfo(torch.int32).max)).long() << 32
    keys = ordered | torch.arange(score.shape[-1])
    return torch.from_numpy(np.sort(keys.numpy(), axis=-1)).bitwise_and_(2**32 - 1)


def _on_cpu(score: Tensor) -> bool:
    """Whether numpy can order the scores."""
    known = score.dtype in (torch.float32, torch.float64)
    return (
        score.device.type == "cpu" and known and score.numel() > 0 and not bool(score.isnan().any())
    )
