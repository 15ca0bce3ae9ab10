"""Budget distribution over layers and heads, shared by several methods.

All functions count tokens per head beside the `window` newest, which every head keeps.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import PlanView, best, whole_tokens


def layers_of(view: PlanView) -> Int[Tensor, " N"]:
    """Return the indices of the layers in view."""
    count = view.score.shape[0]
    return torch.arange(view.first_layer, view.first_layer + count, device=view.score.device)


def pyramid(view: PlanView, window: int, beta: float) -> Float[Tensor, "N B"]:
    """Return budgets that fall linearly to 1 / beta of the average in the last layer.

    No layer gets more tokens than it has; the excess of the first goes to the last (PyramidKV;
    `pyramidkv_press.py` of kvpress, read, which counts the window differently).
    """
    average = (view.budget - window).clamp(min=0).double()
    there = (view.length - window).clamp(min=0).double()
    most = torch.minimum(2 * average - average / beta, torch.maximum(there, average))
    least = 2 * average - most
    depth = layers_of(view).double() / max(view.shape.layers - 1, 1)
    return most - depth[:, None] * (most - least) if view.shape.layers > 1 else average[None]


def cosine(view: PlanView, window: int, last: float) -> Float[Tensor, "N B"]:
    """Return budgets that fall along half a cosine, to `last` of the first layer's."""
    average = (view.budget - window).clamp(min=0).double()
    depth = layers_of(view).double() / max(view.shape.layers - 1, 1)
    every = torch.arange(view.shape.layers, device=view.score.device).double()
    every = every / max(view.shape.layers - 1, 1)

    def weight(at: Tensor) -> Tensor:
        return last + (1 - last) * (1 + torch.cos(torch.pi * at)) / 2

    return weight(depth)[:, None] / weight(every).mean() * average


def adaptive(view: PlanView, average: Float[Tensor, "N B"], floor: float) -> Float[Tensor, "N B H"]:
    """Return per head its number of tokens among the best of its layer.

    A head gets at least `floor` of the average, and the rest in proportion to its best tokens
    (Ada-KV; from a summary of the authors' `snapkv_utils.py`, which was not read). Protected
    tokens, whose scores are infinite, do not compete.
    """
    layers, sequences, heads, places = view.score.shape
    competes = (view.position >= 0) & view.score.isfinite()
    flat = view.score.masked_fill(~competes, -torch.inf).flatten(2)
    chosen = best(flat, (average * heads).long()) & competes.flatten(2)
    found = chosen.view(layers, sequences, heads, places).sum(-1)
    return found * (1 - floor) + average[..., None] * floor


def spread(
    view: PlanView, window: int, asked: Float[Tensor, "N B H"], over: tuple[int, ...]
) -> Int[Tensor, "N B H"]:
    """Round budgets to whole tokens; redistribute what a short prompt cannot fill.

    The excess is distributed in proportion to free capacity, so no head exceeds the prompt.

    Args:
        view: the plan view.
        window: newest tokens, which every head keeps in addition.
        asked: requested tokens beside the window.
        over: dimensions that share: (0, 2) for all heads of all layers, (2,) within a layer.
    """
    whole = (view.length - window).clamp(min=0).double()[:, None]
    kept = torch.minimum(asked, whole)
    room = whole - kept
    excess = (asked - kept).sum(over, keepdim=True)
    part = (excess / room.sum(over, keepdim=True).clamp(min=1)).clamp(max=1)
    return whole_tokens(kept + room * part) + window


def share_of(whole: Int[Tensor, " B"], share: float) -> Int[Tensor, " B"]:
    """Return a share of whole numbers, rounded down unless it is whole up to rounding."""
    return whole_tokens(whole.double() * share)
